"""Llama, and decoders with the same module names: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from shardformer.policies.table import GATHERS, TablePolicy, local, rules, variant
from shardformer.stages.stage import Received, StageLayout
from shardformer.utils.structure import divisors_phrase


class LlamaPolicy(TablePolicy):
    """Policy for Llama. If there are fewer key/value heads than ranks, they are copied.

    If the number of ranks does not divide the heads, they are distributed in groups, each with one key/value head:
    6 groups over 4 ranks as 2, 2, 1, 1.
    """

    family, prefix = "llama", "Llama"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    stages = StageLayout(layers="layers", first={"embed_tokens": Received}, every=("rotary_emb",), last=("norm",))
    supports_sequence_parallel = True

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

    def _query_units(self) -> int:
        """Return the number of units of query heads that are not split: those of a key/value head stay with it."""
        config = self.model.config
        return config.num_key_value_heads if self.uneven_heads else config.num_attention_heads

    def _heads_of_all_groups(self) -> int:
        """Return the query heads per key/value head, times the ranks if each has a key/value head of its own."""
        config = self.model.config
        heads = config.num_attention_heads
        return heads // config.num_key_value_heads * self.tp_size if self.uneven_heads else heads

    table = {
        "{}Model": [rules.vocab("embed_tokens")],
        "{}Attention": [
            GATHERS,
            local(num_key_value_groups=_heads_of_all_groups),
            rules.column("q_proj", num_heads=_query_units, reads="hidden_states"),
            rules.column("k_proj", "v_proj", num_heads="num_key_value_heads", reads="hidden_states"),
            rules.row("o_proj", num_heads=_query_units),
        ],
        "{}MLP": [GATHERS, rules.column("gate_proj", "up_proj"), rules.row("down_proj")],
        "{}DecoderLayer": [rules.rms_norm("input_layernorm", "post_attention_layernorm")],
        "{}ForCausalLM": [rules.head("lm_head")],
    }


class Qwen3Policy(LlamaPolicy):
    """Policy for Qwen3, which normalises the queries and keys of each head with weights shared by all heads."""

    family, prefix = "qwen3", "Qwen3"
    table = {
        **LlamaPolicy.table,
        # Gradients are partial: a rank sees its own heads only.
        "{}Attention": [*LlamaPolicy.table["{}Attention"], rules.head_norm("q_norm", "k_norm")],
    }


MistralPolicy = variant(LlamaPolicy, "mistral", "Mistral")  # its sliding window is in masks, the same on every rank
Qwen2Policy = variant(LlamaPolicy, "qwen2", "Qwen2")
