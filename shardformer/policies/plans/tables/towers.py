"""Plans of encoder-decoder models."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shardformer.loss.text import masked_lm, streams_of_tokens
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.tables.naming import GATED
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
}
