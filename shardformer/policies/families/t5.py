"""T5, mT5 and UMT5. In T5 and mT5 all layers of a stack use the position bias of its first layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import Received, ReceivedByTower, StageLayout


class T5Policy(Policy):
    """Policy for T5. The position biases are sharded by heads.

    Attributes:
        shares_biases: whether a layer returns (hidden state, position bias, cross-attention position bias), with the
            biases of the first layer, instead of only the hidden state.
    """

    family, prefix = "t5", "T5"
    splits_towers = True
    heads = (
        "Model",
        "ForConditionalGeneration",
        "EncoderModel",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    shares_biases = True
    supports_sequence_parallel = True
    head_losses = USUAL_HEAD_LOSSES

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

    def head_counts(self) -> Mapping[str, int]:
        """Return the head count by T5's name for it."""
        return {"num_heads": self.model.config.num_heads}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)
        config = self.model.config
        heads = config.num_heads

        def attention(name: str, *read_together: str) -> ModulePolicyDescription:
            together = [f"{name}.{projection}" for projection in read_together]
            query = [] if "q" in read_together else rules.column(f"{name}.q", num_heads=heads)
            return ModulePolicyDescription(
                sub_module_replacement=[
                    *query,
                    *rules.column(*together, num_heads=heads, reads_whole="q" not in read_together),
                    *rules.row(f"{name}.o", num_heads=heads),
                    *rules.head_sharded_embedding(f"{name}.relative_attention_bias?"),
                    *rules.rms_norm("layer_norm"),
                    *rules.residual_dropout("dropout"),
                ],
            )

        def dense(*column: str) -> ModulePolicyDescription:
            return ModulePolicyDescription(
                sub_module_replacement=[*rules.column(*column), *rules.row("wo"), *rules.region_dropout("dropout")],
                gathers_sequence=True,
            )

        vocabulary = ModulePolicyDescription(sub_module_replacement=[*rules.vocab("shared?"), *rules.head("lm_head?")])
        return {
            f"{self.prefix}Stack": ModulePolicyDescription(sub_module_replacement=rules.vocab("embed_tokens")),
            f"{self.prefix}Attention": ModulePolicyDescription(
                {"n_heads": heads // self.tp_size}, gathers_sequence=True
            ),
            f"{self.prefix}LayerSelfAttention": attention("SelfAttention", "q", "k", "v"),
            f"{self.prefix}LayerCrossAttention": attention("EncDecAttention", "k", "v"),
            f"{self.prefix}DenseActDense": dense("wi"),
            f"{self.prefix}DenseGatedActDense": dense("wi_0", "wi_1"),
            f"{self.prefix}LayerFF": ModulePolicyDescription(
                sub_module_replacement=[*rules.rms_norm("layer_norm"), *rules.residual_dropout("dropout")]
            ),
            **{f"{self.prefix}{head}": vocabulary for head in self.heads},
        }


class MT5Policy(T5Policy):
    """Policy for mT5: the table of T5 with the class names of mT5."""

    family, prefix = "mt5", "MT5"
    head_losses = USUAL_HEAD_LOSSES


class UMT5Policy(T5Policy):
    """Policy for UMT5, where every layer has its own position biases."""

    family, prefix = "umt5", "UMT5"
    shares_biases = False
    head_losses = USUAL_HEAD_LOSSES
