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
_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8, "mamba_n_groups": 1}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_TWO_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}

# model_type -> field of its configuration -> value
FIELDS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("hubert", "unispeech", "unispeech-sat", "wav2vec2", "wavlm", "wav2vec2-conformer"), _SOUND),
    "wav2vec2-bert": {**_SOUND, "feature_projection_input_dim": 24},
    "audio-spectrogram-transformer": {"max_length": 40, "num_mel_bins": 24, "patch_size": 8},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "videomae": {"num_frames": 4},
    # It uses max pooling: with many tokens, some maxima are so close that rounding selects a different one.
    "hiera": {"image_size": [32, 32], "depths": [1, 1, 1, 1], "masked_unit_size": [8, 8]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass": {"sliding_window": DEFAULT},
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
    "swin2sr": {"num_heads": [2, 2, 2, 2], "depths": [1, 1, 1, 1], "embed_dim": 16},
    "swinv2": {
        "num_heads": [2, 2],
        "depths": [2, 2],
        "embed_dim": 16,
        "window_size": 2,
        "pretrained_window_sizes": [0, 0],
    },
    "xlnet": {"max_position_embeddings": DEFAULT},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    **dict.fromkeys(("glm4v_text", "glm46v_text", "qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text"), _SECTIONS),
    **dict.fromkeys(("glm4v_moe_text", "glm_ocr_text", "glm_image_text"), _TWO_SECTIONS),
    "bros": {"hidden_size": 64},
    "convnext": {"image_size": 32},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note": {"num_key_value_heads": 4},
    "mistral4": {"num_key_value_heads": 4},
    "siglip2_vision_model": {"num_patches": 16},
    **dict.fromkeys(("convnextv2", "pvt", "segformer", "glpn", "efficientnet"), {"image_size": 64}),
    "pvt_v2": {"image_size": 64, "num_attention_heads": [2, 2, 4, 4], "hidden_sizes": [16, 16, 32, 32]},
    **dict.fromkeys(("sew", "sew-d"), {**_SOUND, "squeeze_factor": 1}),
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 4, "num_cross_attention_heads": 4}
    | {"num_self_attention_heads": 4, "qk_channels": 32, "v_channels": 32},
    **dict.fromkeys(("bamba", "granitemoehybrid"), _STATE_SPACE),
    "gemma4_text": {"vocab_size_per_layer_input": 101},
    **dict.fromkeys(("vibevoice_acoustic_tokenizer", "vibevoice_acoustic_tokenizer_encoder"), {"num_filters": 2}),
    "mamba2": {"num_heads": 8, "state_size": 16, "chunk_size": 8, "n_groups": 1},
    "switch_transformers": {"router_jitter_noise": 0.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "vjepa2": {"crop_size": 16, "frames_per_clip": 4, "pred_num_hidden_layers": 2, "pred_hidden_size": 32}
    | {"pred_num_attention_heads": 4, "num_pooler_layers": 1},
}
