"""BLOOM and Falcon: query, key and value fused head by head, and ALiBi (arXiv 2108.12409)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardformer.attention.own_attention import BloomRegistryAttention, FalconRegistryAttention, OwnAttention
from shardformer.distributed.random import draw_per_rank
from shardformer.layers import MultiQueryLinear
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardformer.policies.module_edits import use_local_biases
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout


class BloomPolicy(Policy):
    """Policy for BLOOM. Every rank builds the biases of all heads and uses those of its own heads."""

    family, prefix = "bloom", "Bloom"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    supports_sequence_parallel = True
    own_attention: Mapping[str, type[OwnAttention]] = {"BloomAttention": BloomRegistryAttention}
    stages = StageLayout(
        layers="h",
        first={"word_embeddings": Received, "word_embeddings_layernorm": IdentityPlaceholder},
        last=("ln_f",),
        tuple_output=2,
    )
    head_losses = USUAL_HEAD_LOSSES

    def head_counts(self) -> Mapping[str, int]:
        """Return the head count by BLOOM's name for it."""
        return {"n_head": self.model.config.n_head}

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; `slow_but_exact` slices whole weights."""
        config = self.model.config
        if config.pretraining_tp > 1 and config.slow_but_exact and self.tp_size > 1:
            return [*super().check(), "slow_but_exact=True slices whole weights; use slow_but_exact=False"]
        return super().check()

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        heads = self.model.config.n_head
        return {
            "BloomModel": ModulePolicyDescription(sub_module_replacement=rules.vocab("word_embeddings")),
            "BloomAttention": ModulePolicyDescription(
                {"num_heads": heads // self.tp_size},
                [self._use_local_biases],
                [
                    *rules.column("query_key_value", num_heads=heads),
                    *rules.row("dense", num_heads=heads),
                    *rules.region_dropout("attention_dropout"),
                ],
                gathers_sequence=True,
            ),
            "BloomMLP": ModulePolicyDescription(
                sub_module_replacement=[*rules.column("dense_h_to_4h"), *rules.row("dense_4h_to_h")],
                gathers_sequence=True,
            ),
            "BloomBlock": ModulePolicyDescription(
                param_replacement=[self._drop_own_slice],
                sub_module_replacement=rules.layer_norm("input_layernorm", "post_attention_layernorm"),
            ),
            "BloomForCausalLM": ModulePolicyDescription(sub_module_replacement=rules.head("lm_head")),
        }

    def _drop_own_slice(self, layer: nn.Module) -> nn.Module:
        """Draw functional dropout between the regions per rank, because each rank holds its own sequence slice."""
        sees_slice = self.shard_config.sequence is not None
        return draw_per_rank(layer, self.shard_config.group.rank()) if sees_slice else layer

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
    head_losses = USUAL_HEAD_LOSSES

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts, with key/value heads in the new architecture only."""
        config = self.model.config
        counts = {"num_attention_heads": config.num_attention_heads}
        return counts | ({"num_kv_heads": config.num_kv_heads} if config.new_decoder_architecture else {})

    def check(self) -> list[str]:
        """Return why the model cannot be sharded."""
        return Policy.check(self)

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        heads = config.num_attention_heads
        local = {"num_heads": heads // self.tp_size}
        if config.new_decoder_architecture:
            fused = rules.column("query_key_value", num_heads=config.num_kv_heads)
            local["num_kv_heads"] = config.num_kv_heads // self.tp_size
        elif config.multi_query:
            fused = [
                SubModuleReplacementDescription(
                    "query_key_value",
                    MultiQueryLinear,
                    {
                        "num_heads": heads,
                        "head_dim": config.hidden_size // heads,
                        "input_is_gathered": self.shard_config.gathers_sum,
                    },
                )
            ]
        else:
            fused = rules.column("query_key_value", num_heads=heads)
            local["num_kv_heads"] = heads // self.tp_size
        return {
            "FalconModel": ModulePolicyDescription(sub_module_replacement=rules.vocab("word_embeddings")),
            "FalconAttention": ModulePolicyDescription(
                local,
                [self._use_local_biases, self._draw_per_rank],
                [*fused, *rules.row("dense", num_heads=heads), *rules.region_dropout("attention_dropout")],
                gathers_sequence=True,
            ),
            "FalconMLP": ModulePolicyDescription(
                sub_module_replacement=[*rules.column("dense_h_to_4h"), *rules.row("dense_4h_to_h")],
                gathers_sequence=True,
            ),
            "FalconDecoderLayer": ModulePolicyDescription(
                param_replacement=[self._drop_own_slice],
                sub_module_replacement=rules.layer_norm(
                    "input_layernorm?", "post_attention_layernorm?", "ln_attn?", "ln_mlp?"
                ),
            ),
            "FalconForCausalLM": ModulePolicyDescription(sub_module_replacement=rules.head("lm_head")),
        }

    def _draw_per_rank(self, attention: nn.Module) -> nn.Module:
        if self.tp_size > 1:  # SDPA takes the dropout probability of the module and draws the mask itself
            return draw_per_rank(attention, self.shard_config.group.rank())
        return attention
