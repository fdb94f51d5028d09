"""BLOOM and Falcon: query, key and value fused head by head, and ALiBi (arXiv 2108.12409)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shardformer.attention.own_attention import BloomRegistryAttention, FalconRegistryAttention, OwnAttention
from shardformer.policies.base import Policy
from shardformer.policies.module_edits import use_local_biases
from shardformer.policies.table import GATHERS, HEADS, Entry, TablePolicy, local, own, rules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout

_MLP = [GATHERS, rules.column("dense_h_to_4h"), rules.row("dense_4h_to_h")]


class BloomPolicy(TablePolicy):
    """Policy for BLOOM. Every rank builds the biases of all heads and uses those of its own heads."""

    family, prefix = "bloom", "Bloom"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    supports_sequence_parallel = True
    head_fields: tuple[str, ...] = ("n_head",)
    own_attention: Mapping[str, type[OwnAttention]] = {"BloomAttention": BloomRegistryAttention}
    stages = StageLayout(
        layers="h",
        first={"word_embeddings": Received, "word_embeddings_layernorm": IdentityPlaceholder},
        last=("ln_f",),
        tuple_output=2,
    )

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; `slow_but_exact` slices whole weights."""
        config = self.model.config
        if config.pretraining_tp > 1 and config.slow_but_exact and self.tp_size > 1:
            return [*super().check(), "slow_but_exact=True slices whole weights; use slow_but_exact=False"]
        return super().check()

    table: Mapping[str, Sequence[Entry]] = {
        "BloomModel": [rules.vocab("word_embeddings")],
        "BloomAttention": [
            GATHERS,
            local(num_heads="n_head"),
            own("_use_local_biases"),
            rules.column("query_key_value", num_heads="n_head"),
            rules.row("dense", num_heads="n_head"),
            rules.region_dropout("attention_dropout"),
        ],
        "BloomMLP": _MLP,
        "BloomBlock": [rules.draw_own_slice(), rules.layer_norm("input_layernorm", "post_attention_layernorm")],
        "BloomForCausalLM": [rules.head("lm_head")],
    }

    def _use_local_biases(self, attention: nn.Module) -> None:
        if self.tp_size > 1:
            use_local_biases(attention, self.model.config.num_attention_heads, self.shard_config.group)


class FalconPolicy(BloomPolicy):
    """Policy for Falcon: one key/value head for all query heads, one per group, or one per query head."""

    family, prefix = "falcon", "Falcon"
    supports_sequence_parallel = True
    own_attention = {"FalconAttention": FalconRegistryAttention}
    stages = StageLayout(
        layers="h", first={"word_embeddings": Received}, every=("rotary_emb",), last=("ln_f",), tuple_output=2
    )

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts, with key/value heads in the new architecture only."""
        config = self.model.config
        counts = {"num_attention_heads": config.num_attention_heads}
        return counts | ({"num_kv_heads": config.num_kv_heads} if config.new_decoder_architecture else {})

    def check(self) -> list[str]:
        """Return why the model cannot be sharded."""
        return Policy.check(self)

    @property
    def table(self) -> Mapping[str, list[Entry]]:
        """The table; which heads the fused projection has, and what counts them, is in the configuration."""
        config = self.model.config
        heads = config.num_attention_heads
        counts = [local(num_heads=HEADS)]
        if config.new_decoder_architecture:
            fused = rules.column("query_key_value", num_heads="num_kv_heads")
            counts.append(local("num_kv_heads"))
        elif config.multi_query:
            fused = rules.multi_query("query_key_value", num_heads=heads, head_dim=config.hidden_size // heads)
        else:
            fused = rules.column("query_key_value", num_heads=HEADS)
            counts.append(local(num_kv_heads=HEADS))
        return {
            "FalconModel": [rules.vocab("word_embeddings")],
            "FalconAttention": [
                GATHERS,
                *counts,
                own("_use_local_biases"),
                rules.draw_per_rank(),  # SDPA takes the dropout probability of the module and draws the mask itself
                fused,
                rules.row("dense", num_heads=HEADS),
                rules.region_dropout("attention_dropout"),
            ],
            "FalconMLP": _MLP,
            "FalconDecoderLayer": [
                rules.draw_own_slice(),
                rules.layer_norm("input_layernorm?", "post_attention_layernorm?", "ln_attn?", "ln_mlp?"),
            ],
            "FalconForCausalLM": [rules.head("lm_head")],
        }
