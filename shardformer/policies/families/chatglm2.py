"""ChatGLM2, either from this package or from the remote code of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.policies.table import GATHERS, HEADS, Entry, TablePolicy, local, rules
from shardformer.shard_spec import Part
from shardformer.stages.stage import Received, StageLayout
from shardformer.utils.structure import divisors_phrase


class ChatGLM2Policy(TablePolicy):
    """Policy for ChatGLM2: fused query, key and value with fewer key/value heads, and fused gate and up projections."""

    family, prefix = "chatglm2", "ChatGLM"
    module = "shardformer.models.chatglm2.modeling_chatglm"
    heads = ("Model", "ForConditionalGeneration", "ForSequenceClassification")
    stages = StageLayout(
        layers="encoder.layers",
        first={"embedding": Received},
        every=("rotary_pos_emb",),
        last=("encoder.final_layernorm", "output_layer"),
    )
    supports_sequence_parallel = True

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; key/value groups must fit the number of ranks."""
        groups = self.model.config.num_key_value_heads
        if groups % self.tp_size and self.tp_size % groups:
            clash = f"tp_size={self.tp_size} neither divides multi_query_group_num={groups} nor is a multiple of it"
            return [*super().check(), f"{clash}; use {divisors_phrase(groups)}"]
        return super().check()

    @property
    def table(self) -> Mapping[str, list[Entry]]:
        """The table; the kind of norms and of the fused projection is in the configuration."""
        config = self.model.config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        local_groups = max(1, groups // self.tp_size)
        norms = rules.rms_norm if config.rmsnorm else rules.layer_norm
        return {
            "ChatGLMEmbedding": [rules.vocab("word_embeddings")],
            "ChatGLMSelfAttention": [
                GATHERS,
                local(
                    num_heads=HEADS,
                    num_groups=lambda _: local_groups * self.tp_size,
                    num_key_value_groups=lambda _: heads // local_groups,
                ),
                self._fused_projection(),
                rules.row("dense", num_heads=HEADS),
            ],
            "ChatGLMMLP": [
                GATHERS,
                rules.column("dense_h_to_4h", part_size="ffn_hidden_size"),
                rules.row("dense_4h_to_h"),
            ],
            "ChatGLMBlock": [
                norms("input_layernorm", "post_attention_layernorm"),
                rules.residual_dropout("attention_dropout", "mlp_dropout"),
            ],
            "ChatGLMModel": [rules.head("output_layer")],
        }

    def _fused_projection(self) -> Entry:
        config = self.model.config
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.kv_channels
        if not config.multi_query_attention:
            return rules.column("query_key_value", num_heads=HEADS)
        if groups % self.tp_size == 0:
            return rules.column(
                "query_key_value", parts=tuple(Part(count * size, size) for count in (heads, groups, groups))
            )
        return rules.multi_query("query_key_value", num_heads=heads, num_groups=groups, head_dim=size)
