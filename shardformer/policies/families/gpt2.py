"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shardformer.layers.fused_ops import fuse_bias_gelu
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import Shorthand
from shardformer.stages.stage import AddsNothing, PassedThrough, Received, StageLayout


class GPT2Policy(Policy):
    """GPT-2: a fused `Conv1D` for query, key and value, each of the three cut on its own."""

    family, prefix = "gpt2", "GPT2"
    heads = (
        "Model",
        "LMHeadModel",
        "DoubleHeadsModel",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(layers="h", first={"wte": Received, "wpe": AddsNothing, "drop": PassedThrough}, last=("ln_f",))
    supports_sequence_parallel = True
    writes_usual_losses = True

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        cut = Shorthand(self.shard_config)
        config = self.model.config
        heads = config.num_attention_heads
        local_size = config.hidden_size // self.tp_size
        head = ModulePolicyDescription(sub_module_replacement=cut.head("lm_head"))
        return {
            "GPT2Model": ModulePolicyDescription(sub_module_replacement=cut.vocab("wte")),
            "GPT2Attention": ModulePolicyDescription(
                {"num_heads": heads // self.tp_size, "split_size": local_size, "embed_dim": local_size},
                sub_module_replacement=[
                    *cut.column("c_attn", num_heads=heads, part_size=config.hidden_size),
                    *cut.column("q_attn?", num_heads=heads),
                    *cut.row("c_proj", num_heads=heads),
                    *cut.residual_dropout("resid_dropout"),
                ],
                gathers_sequence=True,
            ),
            "GPT2MLP": ModulePolicyDescription(
                sub_module_replacement=[*cut.column("c_fc"), *cut.row("c_proj"), *cut.residual_dropout("dropout")],
                gathers_sequence=True,
                fusions=[partial(fuse_bias_gelu, linear="c_fc", activation="act")],
            ),
            "GPT2Block": ModulePolicyDescription(
                sub_module_replacement=cut.layer_norm("ln_1", "ln_2", "ln_cross_attn?")
            ),
            "GPT2LMHeadModel": head,
            "GPT2DoubleHeadsModel": head,
        }
