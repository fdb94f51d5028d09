"""Plans of causal language models without one of their own."""

from __future__ import annotations

from shardformer.policies.declared import DeclaredPlan
from shardformer.stage import AddsNothing

_LLAMA = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
# The layers of a BART decoder without its encoder.
_DECODER = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}
_DECODER_LOCAL = {"self_attn": ("num_heads", "embed_dim")}
_NEOX = {
    "query_key_value": "colwise",
    "dense": "rowwise",
    "dense_h_to_4h": "colwise",
    "dense_4h_to_h": "rowwise",
}
_FUSED = {"attn.c_attn": "fused_colwise", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}

PLANS = {
    "biogpt": DeclaredPlan(_DECODER, _DECODER_LOCAL, first={"embed_positions": AddsNothing}),
    "ctrl": DeclaredPlan(
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
    "gpt_neox_japanese": DeclaredPlan(_NEOX, {"attention": ("num_attention_heads", "hidden_size")}),
    "imagegpt": DeclaredPlan(_FUSED, {"attn": ("num_heads", "split_size", "embed_dim")}, first={"wpe": AddsNothing}),
    "modernbert_decoder": DeclaredPlan(
        {
            "attn.q_proj": "colwise",
            "attn.k_proj": "colwise",
            "attn.v_proj": "colwise",
            "attn.Wo": "rowwise",
            "mlp.Wi": "packed_colwise",
            "mlp.Wo": "rowwise",
        },
        {"attn": ("num_heads", "all_head_size")},
    ),
    "mpt": DeclaredPlan(
        {
            "attn.Wqkv": "fused_colwise",
            "attn.out_proj": "rowwise",
            "ffn.up_proj": "colwise",
            "ffn.down_proj": "rowwise",
            "attn": "local_biases",
        },
        {"attn": ("n_heads",)},
    ),
    "openai": DeclaredPlan(_FUSED, {"attn": ("n_head", "split_size")}, first={"positions_embed": AddsNothing}),
    "persimmon": DeclaredPlan(
        {
            **_NEOX,
            "self_attn.q_layernorm": "replicated_with_grad_allreduce",
            "self_attn.k_layernorm": "replicated_with_grad_allreduce",
        },
        {"self_attn": ("num_heads", "hidden_size")},
    ),
    "stablelm": DeclaredPlan(_LLAMA, {"self_attn": ("num_heads", "num_key_value_heads", "hidden_size")}),
    "xglm": DeclaredPlan(_DECODER, _DECODER_LOCAL, first={"embed_positions": AddsNothing}),
}
