"""T5, mT5 and UMT5. In T5 and mT5 all layers of a stack use the position bias of its first layer."""

from __future__ import annotations

from typing import Any

from shardformer.policies.table import GATHERS, Entry, TablePolicy, local, rules, variant
from shardformer.stages.stage import Received, ReceivedByTower, StageLayout


def _attention(name: str, reads_encoder: bool = False) -> list[Entry]:
    query, key, value = (f"{name}.{part}" for part in "qkv")
    projections = [rules.column(query, key, value, num_heads="num_heads")]
    if reads_encoder:
        projections = [
            rules.column(query, num_heads="num_heads"),
            rules.column(key, value, num_heads="num_heads", reads_whole=True),
        ]
    return [
        *projections,
        rules.row(f"{name}.o", num_heads="num_heads"),
        rules.head_sharded_embedding(f"{name}.relative_attention_bias?"),
        *_BETWEEN,
    ]


_BETWEEN = [rules.rms_norm("layer_norm"), rules.residual_dropout("dropout")]
_DENSE = [rules.row("wo"), rules.region_dropout("dropout")]
_HEADS = (
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
    heads = _HEADS
    shares_biases = True
    supports_sequence_parallel = True
    head_fields = ("num_heads",)
    table = {
        "{}Stack": [rules.vocab("embed_tokens")],
        "{}Attention": [GATHERS, local(n_heads="num_heads")],
        "{}LayerSelfAttention": _attention("SelfAttention"),
        "{}LayerCrossAttention": _attention("EncDecAttention", reads_encoder=True),
        "{}DenseActDense": [GATHERS, rules.column("wi"), *_DENSE],
        "{}DenseGatedActDense": [GATHERS, rules.column("wi_0", "wi_1"), *_DENSE],
        "{}LayerFF": _BETWEEN,
        **{f"{{}}{name}": [rules.vocab("shared?"), rules.head("lm_head?")] for name in _HEADS},
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
