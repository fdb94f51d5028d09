"""DeBERTa-v2 and v3, whose disentangled attention also projects a table of relative positions."""

from __future__ import annotations

from shardformer.attention.own_attention import DebertaRegistryAttention
from shardformer.policies.base import Policy
from shardformer.policies.table import GATHERS, HEADS, TablePolicy, local, rules
from shardformer.stages.stage import Received, StageLayout

_OUTPUT = (rules.layer_norm("LayerNorm"), rules.residual_dropout("dropout"))


def _has_own_vocabulary(policy: Policy) -> bool:
    """Return whether no head reads the embedding; the newer one uses its weight, and a bias of the full vocabulary."""
    return not hasattr(policy.model, "lm_predictions")


def _shares_key(policy: Policy) -> bool:
    """Return whether query and key also read the table of positions; the value does not."""
    return getattr(policy.model.config, "share_att_key", False)


class DebertaV2Policy(TablePolicy):
    """Policy for DeBERTa-v2. All stages hold the table of relative positions, because every layer reads it."""

    family, prefix = "deberta_v2", "DebertaV2"
    own_attention = {"DisentangledSelfAttention": DebertaRegistryAttention}
    heads = (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    )
    # Attention reads the table of relative positions, which is not sharded, in addition to the sequence.
    supports_sequence_parallel = False
    table = {
        "{}Embeddings": [rules.vocab("word_embeddings", when=_has_own_vocabulary)],
        "DisentangledSelfAttention": [
            GATHERS,
            local(HEADS),
            rules.column("query_proj", "key_proj", num_heads=HEADS),
            rules.column("value_proj", num_heads=HEADS, reads="value_proj", when=_shares_key),
            rules.column(
                "value_proj", num_heads=HEADS, reads="query_proj", when=lambda policy: not _shares_key(policy)
            ),
            rules.column("pos_key_proj?", num_heads=HEADS),
            rules.column("pos_query_proj?", num_heads=HEADS),
            rules.region_dropout("dropout"),
        ],
        "{}SelfOutput": [rules.row("dense", num_heads=HEADS), *_OUTPUT],
        "{}Intermediate": [GATHERS, rules.column("dense")],
        "{}Output": [rules.row("dense"), *_OUTPUT],
        "Legacy{}LMPredictionHead": [rules.head("decoder")],
    }

    @property
    def stages(self) -> StageLayout:
        """The stage layout; the newer head reads the embedding's weight on the last stage."""
        return StageLayout(
            layers="encoder.layer",
            first={"embeddings": Received, "encoder.conv": Received},
            every=("encoder.rel_embeddings", "encoder.LayerNorm"),
            last=() if _has_own_vocabulary(self) else ("embeddings.word_embeddings",),
            tuple_output=2,
        )
