"""Family-specific configuration fields of tiny models, in addition to the usual small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT = object()  # marks fields that keep the default of the configuration's class instead of a small size
_SOUND = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "num_codevectors_per_group": 8,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
    "tdnn_dim": [16, 16],
    "tdnn_kernel": [3, 1],
    "tdnn_dilation": [1, 1],
    "xvector_output_dim": 16,
    "classifier_proj_size": 16,
    "num_labels": 3,
}
_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 16} | {
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_TWO_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]} | {
    "layer_type": "basic"
}
# Detectors with a backbone of their own instead of one of timm's, which has to be installed.
_DETECTOR = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False, "num_queries": 5} | {
    "backbone_config": {**_RESNET, "out_features": ["stage4"], "out_indices": [4]},
    "num_labels": 3,
    "image_size": 64,
}
_LEVELS = {
    **_DETECTOR,
    "backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"], "out_indices": [2, 3, 4]},
}
_REAL_TIME = {
    **_LEVELS,
    "encoder_in_channels": [8, 16, 16],
    "decoder_in_channels": [32, 32, 32],
    "num_denoising": 0,
} | {
    "encoder_hidden_dim": 32,
    "encoder_layers": 1,
}
_STAGE_NAMES = {"stage_names": ["stem", "stage1", "stage2", "stage3", "stage4"]}
_GROUNDED = {**_LEVELS, "backbone_config": {**_LEVELS["backbone_config"], **_STAGE_NAMES}, "max_text_len": 16} | {
    "hidden_size": 64,  # norms of 32 groups: of one channel and one pixel they would be 0, and their gradients rounding
    "num_feature_levels": 4,
    "text_config": {"vocab_size": 1030},
}
_ALL_STAGES = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "out_indices": [1, 2, 3, 4]}
_DETR_HEADS = (
    "num_attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)  # of the masks: hidden + heads in groups of 8
_WITH_MASKS = _DETECTOR | dict.fromkeys(_DETR_HEADS, 8) | {"backbone_config": {**_RESNET, **_ALL_STAGES}}
_CODEC = {"upsample_groups": 4, "num_filters": 2, "codebook_dim": 16, "codebook_size": 16, "num_quantizers": 4}
_BY_KIND = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
_FLOW_HEAD = {"hidden_size": 32, "num_hidden_layers": 2, "frequency_embedding_size": 16}
_UNITS = {"t2u_vocab_size": 101, "t2u_decoder_start_token_id": 2} | {
    f"t2u_{tower}_{name}": size
    for tower in ("encoder", "decoder")
    for name, size in (("layers", 4), ("ffn_dim", 48), ("attention_heads", 4))
}
_NECK = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
_PATCHES = {**_ALL_STAGES, "reshape_hidden_states": False}
_DEPTH = {**_NECK, "reassemble_hidden_size": 32, "head_hidden_size": 8, "backbone_config": _PATCHES}
_KEYPOINTS = {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 32} | {
    "max_keypoints": 8,
    "border_removal_distance": 1,
}
_MEL = {"num_mel_bins": 24, "subsampling_conv_channels": 8}
_TRANSDUCER = {"blank_token_id": 100, "decoder_hidden_size": 16}
_INDEXER = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 4}

# model_type, or the class of a configuration without one -> field -> value
FIELDS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("hubert", "unispeech", "unispeech-sat", "wav2vec2", "wavlm", "wav2vec2-conformer"), _SOUND),
    "wav2vec2-bert": {**_SOUND, "feature_projection_input_dim": 24},
    "audio-spectrogram-transformer": {"max_length": 40, "num_mel_bins": 24, "patch_size": 8},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "videomae": {"num_frames": 4},
    # It uses max pooling: with many tokens, some maxima are so close that rounding selects a different one.
    "hiera": {"image_size": [32, 32], "depths": [1, 1, 1, 1], "masked_unit_size": [8, 8]},
    # What comes before the separator is no answer; the batch has no such token.
    "big_bird": {"attention_type": "original_full", "sep_token_id": 2},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "prophetnet": {"num_hidden_layers": DEFAULT},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "funnel": {"num_hidden_layers": DEFAULT, "block_sizes": [2, 2]},
    "squeezebert": {"embedding_size": 32},
    "swin": {"num_heads": [2, 2], "depths": [2, 2], "embed_dim": 16, "window_size": 2},
    "zaya": {"num_experts_per_tok": 1},
    "swin2sr": {"num_heads": [2, 2, 2, 2], "depths": [1, 1, 1, 1], "embed_dim": 16}
    | {"patch_size": 1, "window_size": 4},
    "swinv2": {
        "num_heads": [2, 2],
        "depths": [2, 2],
        "embed_dim": 16,
        "window_size": 2,
        "pretrained_window_sizes": [0, 0],
    },
    "xlnet": {"max_position_embeddings": DEFAULT},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    **dict.fromkeys(("glm4v_text", "glm46v_text", "glm_ocr_text"), _SECTIONS),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text"), _SECTIONS),
    "glm4v_moe_text": _TWO_SECTIONS,
    "glm_image_text": {**_SECTIONS, "vision_vocab_size": 101},
    "qwen2_5_omni_text": _SECTIONS,
    "bros": {"hidden_size": 64},
    "convnext": {"image_size": 32},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16}
    | {"swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "shared_experts_intermediate_size": 16,
        **_INDEXER,
    },
    "siglip2_vision_model": {"num_patches": 16},
    **dict.fromkeys(("convnextv2", "pvt", "segformer", "glpn"), {"image_size": 64}),
    "pvt_v2": {"image_size": 64, "num_attention_heads": [2, 2, 4, 4], "hidden_sizes": [16, 16, 32, 32]},
    **dict.fromkeys(("sew", "sew-d"), {**_SOUND, "squeeze_factor": 1}),
    "bamba": {**_STATE_SPACE, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_STATE_SPACE, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma4_text": {"vocab_size_per_layer_input": 101},
    **dict.fromkeys(("vibevoice_acoustic_tokenizer", "vibevoice_acoustic_tokenizer_encoder"), {"num_filters": 2}),
    "mamba2": {"num_heads": 8, "state_size": 16, "chunk_size": 8, "n_groups": 2},
    "nemotron_h": {"chunk_size": 8},
    "switch_transformers": {"router_jitter_noise": 0.0},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 2}),
    "vjepa2": {"crop_size": 16, "frames_per_clip": 4, "pred_num_hidden_layers": 2, "pred_hidden_size": 32}
    | {"pred_num_attention_heads": 4, "num_pooler_layers": 1},
    "beit": {"out_indices": [1, 2, 3, 4], "num_labels": 3, "use_mask_token": True},
    "bit": {"num_groups": 2, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "image_size": 64},
    "blip-2": {"num_query_tokens": 2, "image_token_index": 99},
    "bridgetower": {"hidden_size": 128, "contrastive_hidden_size": 32},
    "bridgetower_vision_model": {"hidden_size": 128},
    "bridgetower_text_model": {"hidden_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 99, "IMGIMGAZ": 98}},
    "emu3": {"vocabulary_map": {"<image>": 99, "<|extra_200|>": 98, "<|visual token 000000|>": 97}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {**_BY_KIND["full_attention"], "mrope_section": [2, 1, 1]}},
    },
    "mimi": {**_CODEC, "num_quantizers": 8},  # Moshi has as many codebooks
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    **dict.fromkeys(("table-transformer", "dab-detr"), _DETECTOR),
    **dict.fromkeys(("detr", "conditional_detr"), _WITH_MASKS),
    "d_fine": {**_LEVELS, "encoder_in_channels": [8, 16, 16], "decoder_in_channels": [32, 32, 32], "num_denoising": 0}
    | {"encoder_hidden_dim": 32, "lqe_hidden_dim": 8, "max_num_bins": 8, "backbone_config": _LEVELS["backbone_config"]},
    "lw_detr": {"projector_scale_factors": [1.0], "num_queries": 5, "group_detr": 2, "num_labels": 3, "image_size": 64},
    "omdet-turbo": {**_LEVELS, "apply_layernorm_after_vision_backbone": False, "encoder_in_channels": [8, 16, 16]}
    | {"vision_features_channels": [32, 32, 32], "encoder_layers": 1, "decoder_num_layers": 4, "decoder_num_heads": 4}
    | dict.fromkeys(("encoder_hidden_dim", "decoder_hidden_dim", "task_encoder_hidden_dim"), 32)
    # transformers has no projection of tasks if they are as wide as the decoder, and looks for it.
    | dict.fromkeys(("class_embed_dim", "text_projection_in_dim", "text_projection_out_dim"), 16)
    | dict.fromkeys(("encoder_dim_feedforward", "decoder_dim_feedforward"), 48)
    | {"text_config": {"hidden_size": 16}},
    "deformable_detr": {**_LEVELS, "num_feature_levels": 3},
    "yolos": {"num_detection_tokens": 5, "num_labels": 3, "image_size": [32, 32], "patch_size": 8},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**_BY_KIND["full_attention"], "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    "gemma3n_vision": {"architecture": "test_convnext"},  # timm's own tiny model; the batch has no images
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4, **_INDEXER}
    | {"index_kpool": 2, "n_group": 1},
    "gradium_phonon_tts": {"flow_head_config": _FLOW_HEAD},
    "pocket_tts": {"flow_head_config": _FLOW_HEAD, "audio_bos_token_id": 4, "audio_latent_token_id": 6}
    | {"audio_prompt_token_id": 5},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[1, 0], [2, 2]],
        "spatial_target_layers": [1, 3],
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [1, 3]},
    "granite_speech5_encoder": {"context_size": 8, "num_mel_bins": 24},
    # Of 4 layers, the last one scales queries by their positions; chunks are shorter than a sample.
    "llama4_text": {"floor_scale": 3, "attn_scale": 0.5, "attention_chunk_size": 6},
    "mllama_vision_model": {"intermediate_layers_indices": [1, 3], "vision_output_dim": 96},
    "mimo_v2_flash": {"num_key_value_heads": 2, "n_routed_experts": 4},
    "mistral4": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}
        | {"partial_rotary_factor": 0.5, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32},
    },
    "molmo2_vision": {"image_size": [16, 16]},
    "glm5_next_vision": {"out_hidden_size": 32, "projection_intermediate_size": 48},
    "qwen3_omni_moe_audio_encoder": {"downsample_hidden_size": 16},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
    | {"indexer_compress_ratio": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "hc_lowrank": 8}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "attn_layers": ["local", "local"]}
    | {"local_attn_chunk_length": 1, "local_num_chunks_before": 3, "is_decoder": False},
    "sapiens2": {"head_config": {"upsample_out_channels": [8, 8], "conv_out_channels": [8]}, "num_labels": 4}
    | {"pos_embed_rescale": None}  # random in training
    | {"num_first_full_attention_layers": 2, "num_last_full_attention_layers": 1, "num_key_value_attention_heads": 4},
    "tapas": {"num_aggregation_labels": 0},
    "upernet": {"backbone_config": {**_RESNET, **_ALL_STAGES}}
    | {"hidden_size": 16, "auxiliary_channels": 8, "auxiliary_in_channels": 16, "num_labels": 3, "image_size": 64},
    "videoprism_vision_model": {"image_size": [16, 16], "num_frames": 4, "tubelet_size": [1, 8, 8]}
    | {"num_spatial_layers": 2, "num_temporal_layers": 2, "num_auxiliary_layers": 1},
    "vilt": {"num_images": 2, "modality_type_vocab_size": 3},
    "visual_bert": {"visual_embedding_dim": 16},
    "vitpose": {"backbone_config": {"part_features": 8, "image_size": [32, 32], "patch_size": [8, 8]}}
    | {"image_size": [32, 32]},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "wavtokenizer_encoder": {"codebook_dim": 32, "hidden_size": 32, "codebook_size": 8},
    "apertus1p5": {"image_token_offset": 60, "audio_token_offset": 68, "image_token_id": 98, "audio_token_id": 97},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), {"vision_start_token_id": 97}),
    "Qwen3OmniMoeTalkerConfig": {"vocab_size": 101, "spatial_merge_size": 2},
    "qwen3_omni_moe_talker_code_predictor": {"num_code_groups": 12},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | {"mrope_section": [1, 1, 1, 1]}
    },
    "kyutai_speech_to_text": {"audio_pad_token_id": 160, "audio_bos_token_id": 9, "codebook_vocab_size": 17}
    | {"num_codebooks": 4},
    "csm": {"num_codebooks": 4, "codebook_size": 16, "depth_decoder_config": {"num_codebooks": 4, "vocab_size": 17}},
    "higgs_audio_v2": {"num_codebooks": 4, "codebook_size": 16, "audio_token_id": 99, "audio_delay_token_id": 98},
    "neomme": {"rope_parameters": {"full_attention": {**_BY_KIND["full_attention"], "partial_rotary_factor": 0.5}}},
    "lw_detr_vit": {"image_size": 64, "pretrain_image_size": 64, "num_windows": 4, "window_block_indices": [0, 2]}
    | {"out_indices": [2, 4]},
    "efficientloftr": dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), DEFAULT),
    "vitmatte": {"fusion_hidden_sizes": [16, 8], "convstream_hidden_sizes": [8]},
    **dict.fromkeys(("depth_anything", "prompt_depth_anything"), _DEPTH),
    "chmv2": {"post_process_channels": [8, 8, 16, 16], "fusion_hidden_size": 16, "head_hidden_size": 8}
    | {"number_output_channels": 8, "backbone_config": {**_ALL_STAGES, "return_class_token": True}},
    "depth_pro": {"patch_size": 16, "fusion_hidden_size": 16, "merge_padding_value": 0, "intermediate_hook_ids": [2, 1]}
    | {"intermediate_feature_dims": [16, 16], "scaled_images_feature_dims": [32, 32, 16]},
    "zoedepth": {**_NECK, "backbone_config": {**_PATCHES, "use_relative_position_bias": True}}
    | {"bottleneck_features": 16, "bin_embedding_dim": 16, "num_relative_features": 8},
    "superglue": {"keypoint_detector_config": _KEYPOINTS, "keypoint_encoder_sizes": [8, 16], "sinkhorn_iterations": 5}
    | {"gnn_layers_types": ["self", "cross", "self", "cross"]},
    "lightglue": {"keypoint_detector_config": _KEYPOINTS, "descriptor_dim": 32},
    "pp_doclayout_v2": {**_REAL_TIME, "class_thresholds": [0.1, 0.2, 0.3], "class_order": [1, 0, 2]},
    "pp_doclayout_v3": {**_REAL_TIME, "backbone_config": {**_RESNET, **_ALL_STAGES}, "x4_feat_dim": 8}
    | {"mask_feature_channels": [8, 8]},
    "pp_doclayout_v4": _REAL_TIME,
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "perceiver": {
        "image_size": 16,
        "train_size": [16, 16],
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 4,
    }
    | {"num_cross_attention_heads": 4, "num_self_attention_heads": 4, "qk_channels": 32, "v_channels": 32},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 100},
    "kosmos-2": {"latent_query_num": 2},
    "shieldgemma2": {"yes_token_index": 10, "no_token_index": 11},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "per_layer_config": {}},
    "seamless_m4t": _UNITS,
    "seamless_m4t_v2": {
        **_UNITS,
        "char_vocab_size": 101,
        "t2u_variance_predictor_embed_dim": 32,
        "t2u_variance_predictor_hidden_dim": 16,
    },
    "timm_wrapper": {"architecture": "resnet18", "num_labels": 3, "image_size": 32, "model_args": {"in_chans": 3}},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_tiny_patch16_224",
            "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": [16, 16]} | {"patch_size": 4},
        }
    },
    "cvt": {"drop_path_rate": [0.0, 0.0, 0.0]},
    "deimv2": {**_LEVELS, "encoder_in_channels": [8, 16, 16], "decoder_in_channels": [32, 32, 32], "num_denoising": 0}
    | {"encoder_hidden_dim": 32, "max_num_bins": 8},
    "blt": {"encoder_hash_byte_group_vocab": 101, "local_attention_window_len": 5},
    **dict.fromkeys(("blt_local_encoder", "blt_local_decoder"), {"hidden_size_global": 32}),
    "blip_text_model": {"sep_token_id": 3},
    "clipseg": {"extract_layers": [1, 2, 3], "projection_dim": 32, "reduce_dim": 32, "decoder_intermediate_size": 48},
    "dia": {"delay_pattern": [0, 2, 3]},
    "dia_decoder": {"num_channels": 3, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4}
    | {"cross_head_dim": 8},
    # With other widths the weights that are drawn leave the ReLU behind its depths dead.
    "dpt": {**_NECK, "backbone_out_indices": [0, 1, 2, 3], "num_labels": 3, "fusion_hidden_size": 12},
    # Its weights double the variance in each convolution: narrow ones, or features of unit size, make losses explode.
    "tipsv2_dpt": {"neck_hidden_sizes": [32] * 4, "fusion_hidden_size": 32, "num_labels": 16}
    | {"initializer_range": 0.02, "backbone_config": {**_PATCHES, "apply_layernorm": False}},
    **dict.fromkeys(
        ("emu3_vqgan", "apertus1p5_vision_tokenizer"),
        {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 8},
    ),
    "encodec": {"num_filters": 2, "codebook_size": 8, "upsampling_ratios": [2, 2]},
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), _GROUNDED),
    "instructblip": {"num_query_tokens": 2, "image_token_index": 99},
    "instructblipvideo": {"num_query_tokens": 2, "video_token_index": 99},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 4, 6]}
    | {"key_dim": [8, 8, 8], "depths": [1, 1, 1]},
    "lxmert": {"l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 16, "num_qa_labels": 8}
    | {"num_object_labels": 9, "num_attr_labels": 7},
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "base_attn_unit_dims": [16, 16, 16], "width_multiplier": 0.5}
    | {"n_attn_blocks": [1, 1, 1], "aspp_out_channels": 16, "atrous_rates": [1, 2, 3], "num_labels": 3},
    "moonshine": {"encoder_num_hidden_layers": 4, "encoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moonshine_streaming_encoder": {"sliding_windows": [[5, 2], [5, 2], [5, 0], [5, 0]]},
    "musicgen_decoder": {"decoder_start_token_id": 1},
    "musicgen_melody": {"chroma_length": 5},
    **dict.fromkeys(("parakeet_encoder", "nemotron_asr_streaming_encoder"), _MEL),
    **dict.fromkeys(("parakeet_rnnt", "nemotron_asr_streaming"), _TRANSDUCER),
    "nemotron3_5_asr": {**_TRANSDUCER, "num_prompts": 4, "prompt_intermediate_size": 16, "default_prompt_id": 1},
    "rag": {"n_docs": 2, "reduce_loss": True},
    "rf_detr": {"num_queries": 5, "group_detr": 2, "num_labels": 3, "decoder_self_attention_heads": 4}
    | {"decoder_cross_attention_heads": 4},
    "rf_detr_dinov2": {"image_size": 32},
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), _REAL_TIME),
    "seggpt": {"image_size": [16, 8], "pretrain_image_size": 16, "intermediate_hidden_state_indices": [1, 2, 3]}
    | {"merge_index": 0, "decoder_hidden_size": 8},
    "speecht5": {**_SOUND, "num_mel_bins": 8, "speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16}
    | {"speaker_embedding_dim": 8, "encoder_max_relative_position": 4},
    "tvp": {"backbone_config": {**_RESNET, "out_features": ["stage4"], "out_indices": [4]}, "num_frames": 2}
    | {"visual_prompt_size": 8, "max_img_size": 64, "max_grid_col_position_embeddings": 8}
    | {"max_grid_row_position_embeddings": 8},
    "efficientnet": {"image_size": 64, "width_coefficient": 0.05, "depth_coefficient": 0.2, "hidden_dim": 64},
    "florence_vision": {"embed_dim": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2]}
    | {"num_groups": [2, 2, 2, 2], "window_size": 2, "projection_dim": 32},
    "textnet": {"image_size": [64, 64], "stem_out_channels": 8, "hidden_sizes": [8, 8, 16, 16, 16]}
    | {"conv_layer_kernel_sizes": [[[3, 3]]] * 3 + [[[3, 1], [1, 3]]], "conv_layer_strides": [[2], [2], [2], [1, 1]]},
}

_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
# What defaults leave out and checkpoints have, or a plan may leave out: tests train with it. A tiny model of a user's
# configuration has what that says.
SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "deberta": _RELATIVE,
    "deberta-v2": {**_RELATIVE, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "esm": {"position_embedding_type": "rotary"},
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), {"conv_bias": True}),
    "nllb-moe": {"expert_capacity": 12},  # of a batch of more tokens, some of which are dropped
    "switch_transformers": {"expert_capacity": 2},  # of a sample
}
