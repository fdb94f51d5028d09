"""ELECTRA and ERNIE: the layers of BERT under different names."""

from __future__ import annotations

from collections.abc import Mapping

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.text import replaced_tokens
from shardformer.policies.base import ModulePolicyDescription
from shardformer.policies.families.bert import BertPolicy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout


class ErniePolicy(BertPolicy):
    """Policy for ERNIE."""

    family, prefix = "ernie", "Ernie"
    heads = (
        "Model",
        "ForPreTraining",
        "ForCausalLM",
        "ForMaskedLM",
        "ForNextSentencePrediction",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    head_losses = USUAL_HEAD_LOSSES


class ElectraPolicy(BertPolicy):
    """Policy for ELECTRA: the discriminator, and the language-model heads of the generator."""

    family, prefix = "electra", "Electra"
    heads = (
        "Model",
        "ForPreTraining",
        "ForCausalLM",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
    stages = StageLayout(
        layers="encoder.layer", first={"embeddings": Received, "embeddings_project": IdentityPlaceholder}
    )
    supports_sequence_parallel = True
    head_losses = {**USUAL_HEAD_LOSSES, "ForPreTraining": replaced_tokens}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        table = dict(super().module_policy())
        del table["ElectraLMPredictionHead"]
        rules = ShardingRules(self.shard_config)
        for head in ("ForMaskedLM", "ForCausalLM"):
            table[f"Electra{head}"] = ModulePolicyDescription(sub_module_replacement=rules.head("generator_lm_head"))
        return table
