"""Which policy a model gets, by the qualified name of its class. Policies are imported when asked for."""

from __future__ import annotations

import importlib

from torch import nn

from shardformer.policies.base import Policy

_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "transformers.models.bert.modeling_bert": (
        "shardformer.policies.bert.BertPolicy",
        (
            "BertModel",
            "BertForPreTraining",
            "BertLMHeadModel",
            "BertForMaskedLM",
            "BertForNextSentencePrediction",
            "BertForSequenceClassification",
            "BertForMultipleChoice",
            "BertForTokenClassification",
            "BertForQuestionAnswering",
        ),
    ),
    "transformers.models.roberta.modeling_roberta": (
        "shardformer.policies.bert.RobertaPolicy",
        (
            "RobertaModel",
            "RobertaForCausalLM",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "RobertaForMultipleChoice",
            "RobertaForTokenClassification",
            "RobertaForQuestionAnswering",
        ),
    ),
    "transformers.models.llama.modeling_llama": (
        "shardformer.policies.llama.LlamaPolicy",
        (
            "LlamaModel",
            "LlamaForCausalLM",
            "LlamaForSequenceClassification",
            "LlamaForTokenClassification",
            "LlamaForQuestionAnswering",
        ),
    ),
    "transformers.models.mistral.modeling_mistral": (
        "shardformer.policies.llama.MistralPolicy",
        (
            "MistralModel",
            "MistralForCausalLM",
            "MistralForSequenceClassification",
            "MistralForTokenClassification",
            "MistralForQuestionAnswering",
        ),
    ),
    "transformers.models.qwen2.modeling_qwen2": (
        "shardformer.policies.llama.Qwen2Policy",
        (
            "Qwen2Model",
            "Qwen2ForCausalLM",
            "Qwen2ForSequenceClassification",
            "Qwen2ForTokenClassification",
            "Qwen2ForQuestionAnswering",
        ),
    ),
    "transformers.models.qwen3.modeling_qwen3": (
        "shardformer.policies.llama.Qwen3Policy",
        (
            "Qwen3Model",
            "Qwen3ForCausalLM",
            "Qwen3ForSequenceClassification",
            "Qwen3ForTokenClassification",
            "Qwen3ForQuestionAnswering",
        ),
    ),
    "transformers.models.gpt2.modeling_gpt2": (
        "shardformer.policies.gpt2.GPT2Policy",
        (
            "GPT2Model",
            "GPT2LMHeadModel",
            "GPT2DoubleHeadsModel",
            "GPT2ForSequenceClassification",
            "GPT2ForTokenClassification",
            "GPT2ForQuestionAnswering",
        ),
    ),
}

_POLICIES: dict[str, str] = {
    f"{module}.{name}": policy for module, (policy, names) in _FAMILIES.items() for name in names
}


def register_policy(qualified_name: str, policy: str) -> None:
    """Add a policy of your own.

    Args:
        qualified_name: the model class, "package.module.Class".
        policy: the policy class, "package.module.Class"; imported when a model asks for it.
    """
    _POLICIES[qualified_name] = policy


def policy_for(model: nn.Module) -> Policy:
    """The policy of the model's class, or of the nearest class that it derives from.

    A class of another module (remote code) is matched by its bare name.

    Raises:
        ValueError: no policy is known.
    """
    by_bare_name = {name.rpartition(".")[2]: policy for name, policy in _POLICIES.items()}
    for cls in type(model).__mro__:
        location = _POLICIES.get(f"{cls.__module__}.{cls.__qualname__}") or by_bare_name.get(cls.__name__)
        if location is not None:
            module, _, name = location.rpartition(".")
            return getattr(importlib.import_module(module), name)()
    raise ValueError(
        f"model class {type(model).__name__} has no sharding policy; use one of {', '.join(sorted(by_bare_name))}, "
        "or pass custom_policy=… (docs/writing_a_policy.md)"
    )
