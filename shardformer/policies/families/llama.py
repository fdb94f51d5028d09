"""Llama, and decoders with the same module names: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import Received, StageLayout
from shardformer.utils.structure import divisors_phrase


class LlamaPolicy(Policy):
    """Policy for Llama. If there are fewer key/value heads than ranks, they are copied.

    If the number of ranks does not divide the heads, they are distributed in groups, each with one key/value head:
    6 groups over 4 ranks as 2, 2, 1, 1.
    """

    family, prefix = "llama", "Llama"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    stages = StageLayout(layers="layers", first={"embed_tokens": Received}, every=("rotary_emb",), last=("norm",))
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    @property
    def uneven_heads(self) -> bool:
        """Whether every rank has a key/value head of its own."""
        return self.model.config.num_key_value_heads >= self.tp_size

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; key/value heads must fit the number of ranks."""
        kv_heads = self.model.config.num_key_value_heads
        if kv_heads < self.tp_size and self.tp_size % kv_heads:
            clash = f"tp_size={self.tp_size} neither divides num_key_value_heads={kv_heads} nor is a multiple of it"
            return [*super().check(), f"{clash}; use {divisors_phrase(kv_heads)}"]
        return super().check()

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        is_copied = kv_heads < self.tp_size
        local_groups = heads // self.tp_size if is_copied else heads // kv_heads
        # Keep query heads on the rank of their key/value head.
        query_units = heads if is_copied else kv_heads
        attention = [
            *rules.column("q_proj", num_heads=query_units, reads="hidden_states"),
            *rules.column("k_proj", "v_proj", num_heads=kv_heads, reads="hidden_states"),
            *rules.row("o_proj", num_heads=query_units),
        ]
        return {
            f"{self.prefix}Model": ModulePolicyDescription(sub_module_replacement=rules.vocab("embed_tokens")),
            f"{self.prefix}Attention": ModulePolicyDescription(
                {"num_key_value_groups": local_groups}, [], attention, gathers_sequence=True
            ),
            f"{self.prefix}MLP": ModulePolicyDescription(
                sub_module_replacement=[*rules.column("gate_proj", "up_proj"), *rules.row("down_proj")],
                gathers_sequence=True,
            ),
            f"{self.prefix}DecoderLayer": ModulePolicyDescription(
                sub_module_replacement=rules.rms_norm("input_layernorm", "post_attention_layernorm")
            ),
            f"{self.prefix}ForCausalLM": ModulePolicyDescription(sub_module_replacement=rules.head("lm_head")),
        }


class MistralPolicy(LlamaPolicy):
    """Policy for Mistral. The sliding window only affects masks, which are identical on every rank."""

    family, prefix = "mistral", "Mistral"
    head_losses = USUAL_HEAD_LOSSES


class Qwen2Policy(LlamaPolicy):
    """Policy for Qwen2, whose query, key and value projections have biases."""

    family, prefix = "qwen2", "Qwen2"
    head_losses = USUAL_HEAD_LOSSES


class Qwen3Policy(LlamaPolicy):
    """Policy for Qwen3, which normalises the queries and keys of each head with weights shared by all heads."""

    family, prefix = "qwen3", "Qwen3"
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        table = dict(super().module_policy())
        # Gradients are partial: a rank sees its own heads only.
        norms = ShardingRules(self.shard_config).head_norm("q_norm", "k_norm")
        table["Qwen3Attention"].sub_module_replacement.extend(norms)
        return table
