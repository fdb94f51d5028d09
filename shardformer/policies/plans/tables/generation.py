"""Plans of models that write text or sound about images and sound."""

from __future__ import annotations

from shardformer.loss.heads import own_loss
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.tables.naming import self_attention

_HEADS = ("num_heads", "num_key_value_heads", "embed_dim", "hidden_size")
_OUT = {**self_attention("out_proj"), "fc1": "colwise", "fc2": "rowwise", "layers.*": "activation_dropout"}
_CROSS = {f"encoder_attn.{part}_proj": "colwise" for part in "qkv"} | {"encoder_attn.out_proj": "rowwise"}
_BERT = {f"self.{part}": "colwise" for part in ("query", "key", "value")} | {
    "self.dropout": "dropout",
    "output.dense": "rowwise",
    "intermediate.dense": "colwise",
}
# Attention reads the number of heads of the configuration, so it is replicated.
_MOONSHINE = Plan(
    {"encoder.layers.*.mlp.fc1": "colwise", "decoder.layers.*.mlp.fc1": "packed_colwise", "mlp.fc2": "rowwise"},
    pipelined=False,
)
_MUSICGEN = Plan(
    {**_OUT, **_CROSS},
    dict.fromkeys(("self_attn", "encoder_attn"), _HEADS),
    pipelined=False,
    head_losses={
        f"Musicgen{name}": own_loss
        for name in ("ForCausalLM", "ForConditionalGeneration", "MelodyForCausalLM", "MelodyForConditionalGeneration")
    },
)

PLANS = {
    "dia": Plan(
        {f"{name}.{part}_proj": "colwise" for name in ("self_attention", "cross_attention") for part in "qkv"}
        | {f"{name}.o_proj": "rowwise" for name in ("self_attention", "cross_attention")}
        | {"mlp.gate_up_proj": "packed_colwise", "mlp.down_proj": "rowwise"},
        dict.fromkeys(("self_attention", "cross_attention"), _HEADS),
        pipelined=False,
    ),
    "git": Plan(
        {**_BERT, **_OUT},
        {"self": ("num_attention_heads", "all_head_size"), "self_attn": ("num_heads", "embed_dim")},
        pipelined=False,  # the head reads a number of the first layer
    ),
    "moonshine": _MOONSHINE,
    "moonshine_streaming": _MOONSHINE,
    "musicgen": _MUSICGEN,
    "musicgen_melody": _MUSICGEN,
    # Self-attention of the decoder is replicated: the biases of positions have an entry for every head.
    "pix2struct": Plan(
        {
            **{
                f"{name}.{part}": "colwise"
                for name in ("layer.*.attention", "encoder_decoder_attention.attention")
                for part in ("query", "key", "value")
            },
            "layer.*.attention.output": "rowwise",
            "encoder_decoder_attention.attention.output": "rowwise",
            "wi_0": "colwise",
            "wi_1": "colwise",
            "wo": "rowwise",
        },
        dict.fromkeys(("layer.*.attention", "encoder_decoder_attention.attention"), ("n_heads", "inner_dim")),
        pipelined=False,
        head_losses={"Pix2StructForConditionalGeneration": own_loss},
    ),
    "speecht5": Plan(
        {
            **{f"{name}.{part}_proj": "colwise" for name in ("attention", "self_attn") for part in "qkv"},
            "attention.out_proj": "rowwise",
            "self_attn.out_proj": "rowwise",
            "embed_positions.pe_k": "replicated_with_grad_allreduce",
            "feed_forward.intermediate_dense": "colwise",
            "feed_forward.intermediate_dropout": "dropout",
            "feed_forward.output_dense": "rowwise",
        },
        dict.fromkeys(("attention", "self_attn"), ("num_heads", "embed_dim")),
        pipelined=False,
        head_losses={"SpeechT5ForTextToSpeech": own_loss},
    ),
    "udop": Plan(
        {f"EncDecAttention.{part}": "colwise" for part in "qkv"}
        | {"EncDecAttention.o": "rowwise", "DenseReluDense.dropout": "dropout", "DenseReluDense.wo": "rowwise"}
        | dict.fromkeys(("DenseReluDense.wi", "DenseReluDense.wi_0", "DenseReluDense.wi_1"), "colwise"),
        {"EncDecAttention": ("n_heads", "inner_dim")},
        pipelined=False,
    ),
}
