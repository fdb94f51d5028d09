"""Plans of causal language models without a plan in transformers, and losses of heads that need no plan."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES, own_loss, with_further_entries
from shardformer.loss.terms import HeadLoss
from shardformer.loss.text import (
    causal_lm,
    causal_lm_of_tokens,
    classes_of_tokens,
    codebooks_of_sound,
    conditional_generation,
    masked_lm,
    words_and_answers,
)
from shardformer.policies.families import GATED, GATED_PARTS, LLAMA, attention
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.stages import ExecutionOrder
from shardformer.stages.stage import IdentityPlaceholder, Received, ReceivedUnpadded, ZeroEmbedding

_ATTENTION = attention("o_proj")
_W123 = {"feed_forward.w1": "colwise", "feed_forward.w3": "colwise", "feed_forward.w2": "rowwise"}
_LFM2 = {**_W123, **attention("out_proj")}
_LFM3 = {**_W123, **_ATTENTION, "self_attn.g_proj": "colwise"}
# The layers of a BART decoder without its encoder.
_DECODER = {
    **attention("out_proj"),
    "fc1": "colwise",
    "fc2": "rowwise",
    "layers.*": "activation_dropout",
}
_DECODER_LOCAL = {"self_attn": ("num_heads", "embed_dim")}
_NEOX = {
    "query_key_value": "colwise",
    "dense": "rowwise",
    "dense_h_to_4h": "colwise",
    "dense_4h_to_h": "rowwise",
}
_PERSIMMON = {
    **_NEOX,
    "self_attn.q_layernorm": "replicated_with_grad_allreduce",
    "self_attn.k_layernorm": "replicated_with_grad_allreduce",
}
_PERSIMMON_LOCAL = {"self_attn": ("num_heads", "hidden_size")}
_FUSED = {
    "attn.c_attn": "fused_colwise",
    "attn.attn_dropout": "dropout",
    "attn.c_proj": "rowwise",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}

_MOSHI = Plan(
    {
        **{f"self_attn.{part}_proj.linear": "colwise" for part in "qkv"},
        "self_attn.o_proj.linear": "rowwise",
        "mlp.fc1": "packed_colwise",
        "mlp.fc2": "rowwise",
    },
    {"self_attn": ("num_heads", "num_key_value_heads", "hidden_size")},
)

# No part of a layer can be sharded: its heads are normalised together, or it is a state-space model.
_VOCABULARY = Plan({})


def _keys_and_values(model: nn.Module) -> dict[str, tuple[str | int, ...]]:
    """Return the names of Gemma 3n's shared keys and values: kinds of layers, or up to transformers 5.21 layers."""
    sources = {getattr(module, "kv_shared_layer_index", None) for module in model.modules()} - {None}
    return {"shared_kv_states": tuple(sorted(sources)) or ("full_attention", "sliding_attention")}


def _block_inputs(model: nn.Module) -> dict[str, int]:
    """Return the modules whose outputs are the inputs of blocks; attention in all later layers reads these."""
    block = model.config.get_text_config().n_layers_per_attn_res_block
    count = model.config.get_text_config().num_hidden_layers
    return {"embed_tokens": 0} | {f"layers.{index - 1}": 0 for index in range(block, count, block)}


class ReceivedTable(Received):
    """Placeholder for an embedding of which the model reads a row, the one of padding."""

    num_embeddings, embedding_dim = 1, 1

    @property
    def weight(self) -> Tensor:
        """A dummy table [vocab, hidden]."""
        return self.stage_input.dummy().new_zeros(()).expand(self.num_embeddings, self.embedding_dim)


PLANS = {
    "bitnet": _VOCABULARY,
    "clvp": Plan(
        {
            **attention("out_proj", "attn"),
            "mlp.c_fc": "colwise",
            "mlp.c_proj": "rowwise",
        },
        {"attn": ("num_heads", "embed_dim")},
        head_losses={"ClvpModelForConditionalGeneration": own_loss},
    ),
    "falcon_mamba": _VOCABULARY,
    "fuyu": Plan(_PERSIMMON, _PERSIMMON_LOCAL, layers="language_model.layers"),
    "jetmoe": _VOCABULARY,
    "kosmos2": replace(
        _VOCABULARY,
        first={"vision_model": Received, "image_to_text_projection": Received},  # registered after the layers
        changes_shapes=True,
    ),
    "kosmos2_5": Plan(attention("out_proj"), _DECODER_LOCAL),
    "mamba": _VOCABULARY,
    "mamba2": _VOCABULARY,
    "mllama": Plan(
        {**LLAMA, **attention("o_proj", "cross_attn")},
        {name: ("num_heads", "num_key_value_heads") for name in ("self_attn", "cross_attn")},
        first={"multi_modal_projector": IdentityPlaceholder},  # registered after the layers
        optional_layers="cross_attention_layers",  # to images
    ),
    "kyutai_speech_to_text": replace(_MOSHI, layers="model.layers"),
    "moshi": replace(_MOSHI, head_losses={"MoshiForConditionalGeneration": own_loss}),
    "neomme": Plan(
        {
            **{f"self_attn.{part}_proj": "colwise" for part in "qkv"},
            "output_projection.gate_proj": "colwise",
            "output_projection.o_proj": "rowwise",
            "mlp.up_proj": "colwise",
            "mlp.down_proj": "rowwise",
            "exclusive_self_attention.alpha": "first_dim",  # one for each head
            "value_embeddings.weight": "rowwise_of_values",  # [vocab, features of the values' heads]
        },
        first={"value_embeddings": Received},  # registered after the layers
        kept_outputs={"embed_tokens": 0, "value_embeddings": 0},  # all layers read them
        every=("patch_embeddings",),
    ),
    "trocr": Plan(
        {"fc1": "colwise", "fc2": "rowwise", "layers.*": "activation_dropout"},
        last=("output_projection",),
        head_losses={"TrOCRForCausalLM": masked_lm},  # labels are already shifted to the next token
    ),
    "voxtral_realtime": Plan(None, pipelined=False),  # adds sound to all tokens behind the embedding
    "xlstm": Plan({"ffn.proj_up_gate": "colwise", "ffn.proj_up": "colwise", "ffn.proj_down": "rowwise"}),
    "zaya": Plan(
        {
            "mlp.experts.gate_up_proj": "packed_colwise",
            "mlp.experts.down_proj": "rowwise",
            "mlp.experts": "moe_tp_experts",
        },
        carried_inputs=("prev_router_hidden_states",),
    ),
    "biogpt": Plan(
        _DECODER,
        _DECODER_LOCAL,
        first={"embed_positions": ZeroEmbedding},
        head_losses={"BioGptForTokenClassification": classes_of_tokens},
    ),
    "cpmant": Plan(
        {
            **{f"self_attention.project_{part}": "colwise" for part in "qkv"},
            "self_attention.attention_out": "rowwise",
            "self_attention.dropout": "dropout",
            "w_in.w_0": "colwise",
            "w_in.w_1": "colwise",
            "ffn.ffn.dropout": "dropout",  # of the features of a rank; ffn.dropout is that of the residual
            "ffn.w_out": "rowwise",
            "position_bias.relative_attention_bias": "rowwise",  # [buckets, heads]
        },
        {"self_attention": ("num_heads",)},
        first={"input_embedding": Received, "segment_embedding": Received},  # registered after the layers; sliced
        every=("position_bias",),
        head_losses={"CpmAntForCausalLM": masked_lm},  # labels are not shifted
    ),
    "ctrl": Plan(
        {
            "multi_head_attention.Wq": "colwise",
            "multi_head_attention.Wk": "colwise",
            "multi_head_attention.Wv": "colwise",
            "multi_head_attention.dense": "rowwise",
            "ffn.0": "colwise",
            "ffn.2": "rowwise",
        },
        {"multi_head_attention": ("num_heads", "d_model_size")},
    ),
    "emu3": Plan(LLAMA),
    # The state-space part is replicated.
    "falcon_h1": Plan(
        {**_ATTENTION, **{f"feed_forward.{part}": style for part, style in GATED_PARTS.items()}}, splits_sequence=True
    ),
    # Layers pass on several streams, [streams, batch, seq, hidden].
    "gemma3n": Plan(
        None,
        layers="language_model.layers",
        first={
            "embed_tokens": ReceivedUnpadded,
            "embed_tokens_per_layer": Received,
            "per_layer_projection_norm": Received,
        },
        kept_outputs={"embed_tokens_per_layer": 0, "per_layer_projection_norm": 0},  # every layer reads its own part
        # Which tokens are pictures or sounds is asked for by their embeddings, before the layers.
        every=("per_layer_model_projection", "altup_projections", "embed_vision", "embed_audio"),
        shared_states=_keys_and_values,
    ),
    "gemma4": Plan(
        None,
        layers="language_model.layers",
        first={
            "embed_tokens": ReceivedTable,
            "embed_tokens_per_layer": Received,
            "per_layer_model_projection": Received,
        },
        # Every layer reads its own part of these.
        kept_outputs={"embed_tokens_per_layer": 0, "per_layer_model_projection": 0},
        every=("per_layer_projection_norm",),
        shared_states={"shared_kv_states": ("full_attention", "sliding_attention")},
    ),
    "lfm2": Plan(_LFM2),
    "lfm2_vl": Plan(_LFM2, layers="language_model.layers"),
    "lfm3": Plan(_LFM3),
    "lfm3_vl": Plan({**_LFM3, "self_attn.out_proj": "rowwise"}, layers="language_model.layers"),
    "phi4_multimodal": Plan(None, first={"embed_tokens_extend": Received}),
    # Layers pass on several streams, [batch, seq, streams, hidden].
    "deepseek_v4": Plan(None, first={"embed_tokens": ReceivedUnpadded}),
    "glm5_next": Plan(None, layers="language_model.layers", first={"embed_tokens": ReceivedUnpadded}),
    "hy_v4": Plan(None, first={"embed_tokens": ReceivedUnpadded}, carried_inputs=("prev_topk_indices",)),
    "hy_v4_vl": Plan(
        None,
        layers="language_model.layers",
        first={"embed_tokens": ReceivedUnpadded},
        carried_inputs=("prev_topk_indices",),
    ),
    "inkling": Plan(None, first={"embed_norm": IdentityPlaceholder}),  # registered after the layers in 5.17
    "inkling2": Plan(None, kept_outputs=_block_inputs),
    "higgs_audio_v2": Plan(
        None,
        # Frames of sound are picked from an embedding of their own, which is registered after the layers.
        execution={"*": ExecutionOrder([["embed_tokens"], ["embed_audio_tokens"], ["layers"]], {"layers": 0})},
        head_losses={"HiggsAudioV2ForConditionalGeneration": codebooks_of_sound},
    ),
    "hrm_text": Plan(None, pipelined=False),  # alternates between its two layer lists
    # Attention is replicated if heads are mixed in another way.
    "doge": Plan(GATED),
    "codegen": Plan({"mlp.fc_in": "colwise", "mlp.fc_out": "rowwise"}),
    "diffllama": Plan(GATED),
    "gpt_bigcode": Plan({"mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}),
    "gpt_oss": Plan(
        {
            **_ATTENTION,
            "self_attn.sinks": "first_dim",
            # Stored as [experts, in, out]; features of gate and up alternate.
            "experts.gate_up_proj": "rowwise",
            "experts.gate_up_proj_bias": "rowwise",
            "experts.down_proj": "colwise",
            "experts.down_proj_bias": "partial_bias",
            "mlp.experts": "moe_tp_experts",
        },
        splits_sequence=True,
    ),
    "hunyuan_v1_dense": Plan(
        {
            **LLAMA,
            "self_attn.query_layernorm": "replicated_with_grad_allreduce",
            "self_attn.key_layernorm": "replicated_with_grad_allreduce",
        }
    ),
    **{family: Plan(LLAMA, layers="language_model.layers") for family in ("cosmos3_omni", "qwen3_vl")},
    # The tower of images counts its heads, the text does not.
    "hunyuan_vl": Plan(LLAMA, {"self_attn": ("num_heads",)}, layers="language_model.layers"),
    "openai_privacy_filter": Plan(
        {
            **_ATTENTION,
            "self_attn.sinks": "first_dim",
            # Stored as [experts, in, out], gate in front of up.
            "experts.gate_up_proj": "packed_rowwise",
            "experts.gate_up_proj_bias": "packed_rowwise",
            "experts.down_proj": "colwise",
            "experts.down_proj_bias": "partial_bias",
            "mlp.experts": "moe_tp_experts",
        }
    ),
    "recurrent_gemma": Plan(
        {"mlp_block.gate_proj": "colwise", "mlp_block.up_proj": "colwise", "mlp_block.down_proj": "rowwise"}
    ),
    "rwkv": Plan({"feed_forward.key": "colwise", "feed_forward.value": "rowwise"}, layer_outputs=3),
    "gpt_neox_japanese": Plan(
        {**_NEOX, "attention.attention_dropout": "dropout"}, {"attention": ("num_attention_heads", "hidden_size")}
    ),
    "imagegpt": Plan(
        _FUSED,
        {"attn": ("num_heads", "split_size", "embed_dim")},
        first={"wpe": ZeroEmbedding},
        head_losses={"ImageGPTForCausalImageModeling": causal_lm},
    ),
    "modernbert_decoder": Plan(
        {
            **attention("Wo", "attn"),
            "mlp.Wi": "packed_colwise",
            "mlp.drop": "dropout",
            "mlp.Wo": "rowwise",
        },
        {"attn": ("num_heads", "all_head_size")},
    ),
    "mpt": Plan(
        {
            "attn.Wqkv": "fused_colwise",
            "attn.out_proj": "rowwise",
            "ffn.up_proj": "colwise",
            "ffn.down_proj": "rowwise",
            "attn": "local_biases",
        },
        {"attn": ("n_heads",)},
    ),
    "openai": Plan(_FUSED, {"attn": ("n_head", "split_size")}, first={"positions_embed": ZeroEmbedding}),
    "persimmon": Plan(_PERSIMMON, _PERSIMMON_LOCAL),
    "stablelm": Plan(LLAMA, {"self_attn": ("num_heads", "num_key_value_heads", "hidden_size")}),
    "xglm": Plan({**_DECODER, "self_attn": "draws_per_rank"}, _DECODER_LOCAL, first={"embed_positions": ZeroEmbedding}),
}


def _without_z_loss(model: nn.Module) -> HeadLoss | None:
    """Return the causal loss, unless the model adds the squared normalisers of its logits to it."""
    return None if model.z_loss_coefficient else causal_lm(model)


HEAD_LOSSES = {
    # Compute the usual losses in their own forward.
    **dict.fromkeys(("eurobert", "gemma3", "qwen3_5", "ultrabert", "ultravbert"), USUAL_HEAD_LOSSES),
    **{
        family: {**USUAL_HEAD_LOSSES, f"{prefix}ForConditionalGeneration": causal_lm_of_tokens}
        for family, prefix in (
            ("granite_speech", "GraniteSpeech"),
            ("granite_speech_plus", "GraniteSpeechPlus"),
            ("qwen2_audio", "Qwen2Audio"),
        )
    },
    "bamba": {"BambaForCausalLM": _without_z_loss},
    "lxmert": {"LxmertForPreTraining": words_and_answers},
    "vibevoice": {
        "VibeVoiceForConditionalGeneration": with_further_entries(conditional_generation, "acoustic_loss_mask")
    },
}
