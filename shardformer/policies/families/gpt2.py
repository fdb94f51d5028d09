"""GPT-2 and GPT-Neo."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.attention.own_attention import GPTJRegistryAttention
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout, ZeroEmbedding


class GPT2Policy(Policy):
    """Policy for GPT-2, with a fused `Conv1D` for query, key and value, each sharded independently."""

    family, prefix = "gpt2", "GPT2"
    heads = (
        "Model",
        "LMHeadModel",
        "DoubleHeadsModel",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(
        layers="h", first={"wte": Received, "wpe": ZeroEmbedding, "drop": IdentityPlaceholder}, last=("ln_f",)
    )
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        heads = config.num_attention_heads
        local_size = config.hidden_size // self.tp_size
        head = ModulePolicyDescription(sub_module_replacement=rules.head("lm_head"))
        return {
            "GPT2Model": ModulePolicyDescription(sub_module_replacement=rules.vocab("wte")),
            "GPT2Attention": ModulePolicyDescription(
                {"num_heads": heads // self.tp_size, "split_size": local_size, "embed_dim": local_size},
                sub_module_replacement=[
                    *rules.column("c_attn", num_heads=heads, part_size=config.hidden_size),
                    *rules.column("q_attn?", num_heads=heads),
                    *rules.row("c_proj", num_heads=heads),
                    *rules.residual_dropout("resid_dropout"),
                ],
                gathers_sequence=True,
            ),
            "GPT2MLP": ModulePolicyDescription(
                sub_module_replacement=[
                    *rules.column("c_fc"),
                    *rules.row("c_proj"),
                    *rules.residual_dropout("dropout"),
                ],
                gathers_sequence=True,
            ),
            "GPT2Block": ModulePolicyDescription(
                sub_module_replacement=rules.layer_norm("ln_1", "ln_2", "ln_cross_attn?")
            ),
            "GPT2LMHeadModel": head,
            "GPT2DoubleHeadsModel": head,
        }


class GPTNeoPolicy(Policy):
    """Policy for GPT-Neo."""

    supports_ulysses = False  # attention does not use the registry
    family, prefix = "gpt_neo", "GPTNeo"
    heads: tuple[str, ...] = (
        "Model",
        "ForCausalLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(
        layers="h",
        first={"wte": Received, "wpe": ZeroEmbedding, "drop": IdentityPlaceholder},
        last=("ln_f",),
        tuple_output=2,
    )
    # (attention class, its head count attribute, feed-forward input and output projections, norms of a layer)
    attention, count, feed_forward, norms = "SelfAttention", "num_heads", ("c_fc", "c_proj"), ("ln_1", "ln_2")
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

    def head_counts(self) -> Mapping[str, int]:
        """Return the head count by the family's name for it."""
        return {self.count: getattr(self.model.config, self.count)}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        heads = getattr(self.model.config, self.count)
        grow, shrink = self.feed_forward
        return {
            f"{self.prefix}Model": ModulePolicyDescription(sub_module_replacement=rules.vocab("wte")),
            f"{self.prefix}{self.attention}": ModulePolicyDescription(
                {self.count: heads // self.tp_size},
                sub_module_replacement=[
                    *rules.column("q_proj", "k_proj", "v_proj", num_heads=heads),
                    *rules.row("out_proj", num_heads=heads),
                    *rules.region_dropout("attn_dropout?"),
                    *rules.residual_dropout("resid_dropout"),
                ],
                gathers_sequence=True,
            ),
            f"{self.prefix}MLP": ModulePolicyDescription(
                sub_module_replacement=[*rules.column(grow), *rules.row(shrink), *rules.residual_dropout("dropout")],
                gathers_sequence=True,
            ),
            f"{self.prefix}Block": ModulePolicyDescription(sub_module_replacement=rules.layer_norm(*self.norms)),
            f"{self.prefix}ForCausalLM": ModulePolicyDescription(sub_module_replacement=rules.head("lm_head")),
        }


class GPTJPolicy(GPTNeoPolicy):
    """Policy for GPT-J. Attention and feed-forward read the same norm, and the head has a bias.

    Since transformers 5.24 its attention uses the registry, and has no module of dropout.
    """

    family, prefix = "gptj", "GPTJ"
    supports_ulysses = True
    own_attention = {"GPTJAttention": GPTJRegistryAttention}
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering")
    stages = StageLayout(
        layers="h", first={"wte": Received, "drop": IdentityPlaceholder}, last=("ln_f",), tuple_output=2
    )
    attention, count, feed_forward, norms = "Attention", "num_attention_heads", ("fc_in", "fc_out"), ("ln_1",)
    head_losses = USUAL_HEAD_LOSSES
