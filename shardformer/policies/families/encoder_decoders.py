"""Encoder-decoders: BART, its likes, Whisper and T5."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from shardformer.attention.own_attention import MvpRegistryAttention
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.text import masked_lm
from shardformer.policies.base import Policy
from shardformer.policies.module_edits import drop_behind_activation
from shardformer.policies.rules import GATHERS, Entry, TablePolicy, local, own, projections, rules, variant
from shardformer.stages.stage import (
    IdentityPlaceholder,
    Received,
    ReceivedByTower,
    StageLayout,
    StagePlaceholder,
    ZeroEmbedding,
)

# Decoders without an encoder take labels that are already shifted to the next token.
_HEAD_LOSSES = {**USUAL_HEAD_LOSSES, "ForCausalLM": masked_lm}
_ENCODER_HEADS, _DECODER_HEADS = "encoder_attention_heads", "decoder_attention_heads"


def _attention(name: str, heads: str, reads_encoder: bool = False) -> list[Entry]:
    entries = projections(*(f"{name}.{part}_proj" for part in "qkv"), num_heads=heads, reads_encoder=reads_encoder)
    return [*entries, rules.row(f"{name}.out_proj", num_heads=heads), rules.layer_norm(f"{name}_layer_norm")]


def _adds_to_logits(policy: Policy) -> bool:
    """Return whether a bias is added to the logits after the head, so that they must be gathered."""
    return hasattr(policy.model, "final_logits_bias")


_FFN = [rules.column("fc1", gathers_sequence=True), rules.row("fc2"), rules.layer_norm("final_layer_norm")]
_LAYER = [own("_drop_behind_activation"), rules.draw_own_slice()]
_BART = {
    "{}Encoder": [rules.vocab("embed_tokens?")],
    "{}Decoder": [rules.vocab("embed_tokens")],
    "{}Attention": [GATHERS, own("_keep_local_heads")],
    "{}EncoderLayer": [*_LAYER, *_attention("self_attn", _ENCODER_HEADS), *_FFN],
    "{}DecoderLayer": [
        *_LAYER,
        *_attention("self_attn", _DECODER_HEADS),
        *_attention("encoder_attn", _DECODER_HEADS, reads_encoder=True),
        *_FFN,
    ],
}
_HEADS = [
    rules.vocab("shared?"),
    rules.gathered_lm_head("lm_head?", when=_adds_to_logits),
    rules.head("lm_head?", when=lambda policy: not _adds_to_logits(policy)),
    rules.head("proj_out?"),
]


class BartPolicy(TablePolicy):
    """Policy for BART and encoder-decoders with its q_proj, k_proj, v_proj, out_proj, fc1 and fc2."""

    family, prefix = "bart", "Bart"
    splits_towers = True
    heads: tuple[str, ...] = (
        "Model",
        "ForConditionalGeneration",
        "ForSequenceClassification",
        "ForQuestionAnswering",
        "ForCausalLM",
    )
    head_names: tuple[str, ...] = ("lm_head", "classification_head", "qa_outputs")
    encoder_first: Mapping[str, type[StagePlaceholder]] = {
        "shared": Received,
        "encoder.embed_tokens": Received,
        "encoder.embed_positions": ZeroEmbedding,
        "encoder.layernorm_embedding": IdentityPlaceholder,
    }
    supports_sequence_parallel = True
    head_losses = _HEAD_LOSSES
    head_fields = (_ENCODER_HEADS, _DECODER_HEADS)

    @property
    def table(self) -> Mapping[str, list[Entry]]:
        """The table of the family's modules; each head class has the embeddings and heads as its own modules."""
        return _BART | {f"{{}}{name}": _HEADS for name in self.heads}

    @property
    def stages(self) -> StageLayout:
        """The stage layout of the towers that the model has."""
        base = self.model.get_submodule(self.base_path)
        # Modules that a class does not have (a tower, a norm) may be named: the partitioner skips them.
        decoder = StageLayout(
            layers="decoder.layers",
            first={
                "decoder.embed_tokens": Received,
                "decoder.embed_positions": ZeroEmbedding,
                "decoder.layernorm_embedding": IdentityPlaceholder,
            },
            last=("decoder.layer_norm", *self.head_names),
        )
        if not hasattr(base, "encoder"):
            return decoder
        return StageLayout(
            layers="encoder.layers",
            first=self.encoder_first,
            last=("encoder.layer_norm", *(() if hasattr(base, "decoder") else self.head_names)),
            finished_towers={"encoder": ("last_hidden_state",)} if hasattr(base, "decoder") else {},
            next_layers=decoder if hasattr(base, "decoder") else None,
        )

    def _keep_local_heads(self, attention: nn.Module) -> nn.Module:
        attention.num_heads //= self.tp_size  # the towers may have different numbers of heads
        attention.embed_dim //= self.tp_size
        return attention

    def _drop_behind_activation(self, layer: nn.Module) -> None:
        if self.tp_size > 1:
            drop_behind_activation(layer, self.shard_config.group.rank())


class MvpPolicy(BartPolicy):
    """Policy for MVP, without prompts before the keys and values of its layers."""

    family, prefix = "mvp", "Mvp"
    needs = {"use_prompt": False}
    own_attention = {"MvpAttention": MvpRegistryAttention}
    head_losses = _HEAD_LOSSES

    @property
    def table(self) -> Mapping[str, list[Entry]]:
        """BART's table; the model computes attention, with its dropout, itself."""
        return super().table | {"{}Attention": [*_BART["{}Attention"], rules.draw_per_rank()]}


class WhisperPolicy(BartPolicy):
    """Policy for Whisper, whose encoder starts with convolutions instead of an embedding."""

    family, prefix = "whisper", "Whisper"
    heads = ("Model", "ForConditionalGeneration", "ForCausalLM", "ForAudioClassification")
    head_names = ("projector", "classifier", "proj_out", "layer_weights")
    encoder_first = {"encoder.conv1": Received, "encoder.conv2": Received, "encoder.embed_positions": ZeroEmbedding}
    head_losses = _HEAD_LOSSES

    @property
    def reads_hidden_states(self) -> Collection[str]:
        """A weighted sum of the outputs of all layers, if it is asked for."""
        sums = getattr(self.model.config, "use_weighted_layer_sum", False) and hasattr(self.model, "layer_weights")
        return (type(self.model).__name__,) if sums else ()


_GENERATION = ("Model", "ForConditionalGeneration")
MBartPolicy = variant(BartPolicy, "mbart", "MBart")
PLBartPolicy = variant(
    BartPolicy,
    "plbart",
    "PLBart",
    heads=(*_GENERATION, "ForSequenceClassification", "ForCausalLM"),
)
PegasusPolicy, BlenderbotPolicy, BlenderbotSmallPolicy = (
    variant(BartPolicy, family, prefix, heads=(*_GENERATION, "ForCausalLM"))
    for family, prefix in (
        ("pegasus", "Pegasus"),
        ("blenderbot", "Blenderbot"),
        ("blenderbot_small", "BlenderbotSmall"),
    )
)
MarianPolicy = variant(BartPolicy, "marian", "Marian", heads=("Model", "MTModel", "ForCausalLM"))
M2M100Policy = variant(BartPolicy, "m2m_100", "M2M100", heads=_GENERATION)


def _t5_attention(name: str, reads_encoder: bool = False) -> list[Entry]:
    return [
        *projections(*(f"{name}.{part}" for part in "qkv"), num_heads="num_heads", reads_encoder=reads_encoder),
        rules.row(f"{name}.o", num_heads="num_heads"),
        rules.head_sharded_embedding(f"{name}.relative_attention_bias?"),
        *_BETWEEN,
    ]


_BETWEEN = [rules.rms_norm("layer_norm"), rules.residual_dropout("dropout")]
_DENSE = [rules.row("wo"), rules.region_dropout("dropout")]
_T5_HEADS = (
    "Model",
    "ForConditionalGeneration",
    "EncoderModel",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


class T5Policy(TablePolicy):
    """Policy for T5. The position biases are sharded by heads.

    Attributes:
        shares_biases: whether a layer returns (hidden state, position bias, cross-attention position bias), with the
            biases of the first layer, instead of only the hidden state.
    """

    family, prefix = "t5", "T5"
    splits_towers = True
    heads = _T5_HEADS
    shares_biases = True
    supports_sequence_parallel = True
    head_fields = ("num_heads",)
    table = {
        "{}Stack": [rules.vocab("embed_tokens")],
        "{}Attention": [GATHERS, local(n_heads="num_heads")],
        "{}LayerSelfAttention": _t5_attention("SelfAttention"),
        "{}LayerCrossAttention": _t5_attention("EncDecAttention", reads_encoder=True),
        "{}DenseActDense": [GATHERS, rules.column("wi"), *_DENSE],
        "{}DenseGatedActDense": [GATHERS, rules.column("wi_0", "wi_1"), *_DENSE],
        "{}LayerFF": _BETWEEN,
        **{f"{{}}{name}": [rules.vocab("shared?"), rules.head("lm_head?")] for name in _T5_HEADS},
    }

    @property
    def stages(self) -> StageLayout:
        """The stage layout of the towers that the model has."""
        has_decoder = hasattr(self.model.get_submodule(self.base_path), "decoder")
        layer: dict[str, Any] = {}
        if self.shares_biases:
            biases = ("position_bias",)
            layer = {"tuple_output": 3, "carried_inputs": biases, "head_inputs": biases}
        decoder = StageLayout(
            layers="decoder.block",
            first={"decoder.embed_tokens": Received},
            last=("decoder.final_layer_norm", "lm_head", "qa_outputs"),
            **layer,
        )
        return StageLayout(
            layers="encoder.block",
            first={"encoder.embed_tokens": Received, "shared": ReceivedByTower},
            last=("encoder.final_layer_norm",),
            finished_towers={"encoder": ("last_hidden_state",)} if has_decoder else {},
            next_layers=decoder if has_decoder else None,
            **layer,
        )


MT5Policy = variant(T5Policy, "mt5", "MT5")
UMT5Policy = variant(T5Policy, "umt5", "UMT5", shares_biases=False)  # every layer has its own position biases
