"""Plans of encoder-decoders, and of models that write text or sound about images and sound."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shardformer.loss.heads import own_loss
from shardformer.loss.text import masked_lm, streams_of_tokens
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.tables import GATED, self_attention
from shardformer.stages.stage import IdentityPlaceholder, Received, ReceivedUnpadded, UnreachablePlaceholder

_TOWERS = ("encoder.layers", "decoder.layers")
_ATTENTIONS = ("self_attn", "encoder_attn", "cross_attention")
_QKV = {f"{name}.{part}_proj": "colwise" for name in _ATTENTIONS for part in "qkv"} | {
    f"{name}.out_proj": "rowwise" for name in _ATTENTIONS
}
_FEED_FORWARD = {"fc1": "colwise", "fc2": "rowwise", "ffn.dropout": "dropout", "layers.*": "activation_dropout"}
_STYLES = {**_QKV, **_FEED_FORWARD}
_LOCAL = dict.fromkeys(_ATTENTIONS, ("num_heads", "embed_dim"))
# T5-like towers, whose encoder may have another attention than T5's. Self-attention is replicated.
_POP2PIANO = Plan(
    {
        "EncDecAttention.q": "colwise",
        "EncDecAttention.k": "colwise",
        "EncDecAttention.v": "colwise",
        "EncDecAttention.o": "rowwise",
        "DenseReluDense.wi": "colwise",
        "DenseReluDense.wi_0": "colwise",
        "DenseReluDense.wi_1": "colwise",
        "DenseReluDense.wo": "rowwise",
        "DenseReluDense.dropout": "dropout",
    },
    {"EncDecAttention": ("n_heads", "inner_dim")},
    towers=("encoder.block", "decoder.block"),
    carried_inputs=("position_bias",),
)


def _makes_units(model: nn.Module) -> bool:
    """Return whether a Seamless model is its part from text to units of speech alone."""
    return "TextToUnitForConditionalGeneration" in type(model).__name__


def _seamless_towers(model: nn.Module) -> tuple[str, str]:
    return _TOWERS if _makes_units(model) else ("text_encoder.layers", "text_decoder.layers")


_SEAMLESS = Plan(
    _STYLES,
    _LOCAL,
    towers=_seamless_towers,
    # Of speech:
    layers=("speech_encoder.encoder.layers", "text_decoder.layers"),
    kept_outputs={"speech_encoder.inner_layer_norm": 0},
    changes_shapes=True,
)
_NORM_OF_EMBEDDINGS = {"layernorm_embedding": IdentityPlaceholder}  # registered after the layers
_ROUTER = {"router.classifier": "skips_idle_casts"}
# A tower of images runs on the first stage; later stages do not get the images.
_VISION = {"vision_tower": UnreachablePlaceholder, "multi_modal_projector": UnreachablePlaceholder}

_COUNTS = ("num_heads", "num_key_value_heads", "embed_dim", "hidden_size")
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
    dict.fromkeys(("self_attn", "encoder_attn"), _COUNTS),
    pipelined=False,
    head_losses={
        f"Musicgen{name}": own_loss
        for name in ("ForCausalLM", "ForConditionalGeneration", "MelodyForCausalLM", "MelodyForConditionalGeneration")
    },
)

PLANS = {
    "switch_transformers": Plan(
        {**{f"EncDecAttention.{part}": "colwise" for part in "qkv"}, "EncDecAttention.o": "rowwise", **_ROUTER},
        {"EncDecAttention": ("n_heads", "inner_dim")},
        towers=("encoder.block", "decoder.block"),
        carried_inputs=("position_bias",),
    ),
    "bigbird_pegasus": Plan(
        {
            **_STYLES,
            "self.query": "colwise",
            "self.key": "colwise",
            "self.value": "colwise",
            "self_attn.output": "rowwise",
        },
        {**_LOCAL, "self_attn.self": ("num_attention_heads", "all_head_size")},
        towers=_TOWERS,
        needs={"attention_type": "original_full"},
        head_losses={"BigBirdPegasusForCausalLM": masked_lm},  # labels are already shifted to the next token
    ),
    "florence2": Plan(_STYLES, _LOCAL, towers=_TOWERS, first={**_VISION, **_NORM_OF_EMBEDDINGS}),
    "led": Plan(
        # Attention is replicated: the encoder's windows mix heads before they are concatenated.
        _FEED_FORWARD,
        towers=_TOWERS,
        first={
            "encoder.embed_tokens": ReceivedUnpadded,  # pads tokens to whole windows
            **_NORM_OF_EMBEDDINGS,
        },
    ),
    # A layer returns five values. The fourth, the cross-attention bias, is recomputed from the mask if it is missing.
    "longt5": replace(_POP2PIANO, layer_outputs=5),
    "pop2piano": _POP2PIANO,
    "nllb_moe": Plan({**_QKV, **_ROUTER}, _LOCAL, towers=_TOWERS),
    "pegasus_x": Plan(
        _FEED_FORWARD,
        towers=_TOWERS,
        first={"encoder.embed_tokens": ReceivedUnpadded},
        carried_inputs=("global_hidden_states",),
    ),
    # Attention is replicated: its masks have an entry for every head. A decoder layer runs on several streams, each as
    # long as the token ids.
    "prophetnet": Plan(
        {
            "feed_forward.intermediate": "colwise",
            "feed_forward.output": "rowwise",
            "feed_forward": "activation_dropout",
        },
        towers=_TOWERS,
        first={
            "decoder.word_embeddings": ReceivedUnpadded,
            "decoder.embeddings_layer_norm": IdentityPlaceholder,  # registered after the layers
        },
        every=("position_embeddings", "ngram_embeddings"),
        whole_logits=True,
        head_losses=dict.fromkeys(("ProphetNetForConditionalGeneration", "ProphetNetForCausalLM"), streams_of_tokens),
    ),
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": replace(
        _SEAMLESS,
        # The decoder to units repeats its inputs as often as durations say that an encoder's output determines.
        pipelined=lambda model: not _makes_units(model),
    ),
    "t5gemma2": Plan(
        GATED,
        towers=("encoder.text_model.layers", "decoder.layers"),
        first=_VISION,
        last=("encoder.text_model.norm", "decoder.norm"),  # registered before the layers
        cut_vocabulary=False,  # custom embedding class
    ),
    "t5gemma": Plan(None, towers=_TOWERS, last=("encoder.norm", "decoder.norm")),
    "speech_to_text": Plan(_STYLES, _LOCAL, towers=_TOWERS, first={"encoder.conv": Received}),
    "dia": Plan(
        {f"{name}.{part}_proj": "colwise" for name in ("self_attention", "cross_attention") for part in "qkv"}
        | {f"{name}.o_proj": "rowwise" for name in ("self_attention", "cross_attention")}
        | {"mlp.gate_up_proj": "packed_colwise", "mlp.down_proj": "rowwise"},
        dict.fromkeys(("self_attention", "cross_attention"), _COUNTS),
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
