"""Which loss a head computes, by the name of its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from torch import nn

from shardformer.losses.image import ContrastiveLoss, masked_pixels, masked_visual_tokens, segmentation
from shardformer.losses.sound import connectionist, mean_of_samples
from shardformer.losses.terms import HeadLoss, LossTerm
from shardformer.losses.text import (
    balances_experts,
    causal_lm,
    conditional_generation,
    language_of_images,
    masked_lm,
    plain_classes,
    pretraining,
    question_answering,
    recurring_spans,
    replaced_tokens,
    sequence_classification,
)
from shardformer.policies.declared import declared_plan_of
from shardformer.policies.registry import supported_classes

__all__ = ["HeadLoss", "LossTerm", "balances_experts", "head_loss_of", "known_head"]


def head_loss_of(model: nn.Module) -> HeadLoss | None:
    """The loss of the model's head by its class name.

    None for a head (or a bare model) that has none, and for one that may compute another loss than its name says: a
    forward of the user's own, or one of a family that no policy and no plan is for and that does not call
    transformers' `loss_function`. Then the model's own loss counts.
    """
    name = known_head(type(model))
    if name is None:
        return None
    if name in _BY_NAME:
        return _BY_NAME[name](model)
    for suffix, build in _BY_SUFFIX.items():
        if name.endswith(suffix):
            return build(model)
    return None


def known_head(cls: type) -> str | None:
    """Name of the head class of transformers, or of this package, whose forward `cls` has."""
    definer = next(each for each in cls.__mro__ if "forward" in vars(each))
    if definer.__module__.startswith("shardformer."):
        return definer.__name__
    if not definer.__module__.startswith("transformers."):  # remote code is known by the name of its class
        return cls.__name__ if any(name.endswith(f".{cls.__name__}") for name in supported_classes()) else None
    head = next(each for each in cls.__mro__ if each.__module__.startswith("transformers."))
    is_tested = (
        f"{head.__module__}.{head.__name__}" in supported_classes()
        or declared_plan_of(head) is not None
        or head.__module__.split(".")[2] in _USUAL
    )
    return head.__name__ if is_tested or "self.loss_function(" in inspect.getsource(definer.forward) else None


# Families with a plan of transformers whose heads write the usual losses out.
_USUAL = (
    "eurobert",
    "gemma3",
    "granite_speech",
    "granite_speech_plus",
    "qwen2_audio",
    "qwen3_5",
    "ultrabert",
    "ultravbert",
)
# Decoders of these encoder-decoders take labels that are already those of the next token.
_NOT_SHIFTED = (
    "Bart",
    "BigBirdPegasus",
    "Blenderbot",
    "BlenderbotSmall",
    "Marian",
    "MBart",
    "Mvp",
    "Pegasus",
    "PLBart",
    "TrOCR",
    "Whisper",
)

# Heads whose loss is not that of others with their suffix.
_BY_NAME: dict[str, Callable[[nn.Module], HeadLoss | None]] = {
    **{f"{family}ForCausalLM": masked_lm for family in _NOT_SHIFTED},
    **{f"Blip2{head}": language_of_images for head in ("ForConditionalGeneration", "Model")},
    "BertGenerationDecoder": causal_lm,
    **dict.fromkeys(("FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"), masked_lm),
    # They search with beams: the mean is the model's own.
    **{f"{family}ForQuestionAnswering": lambda _: None for family in ("Flaubert", "XLM", "XLNet")},
    "ViltForQuestionAnswering": lambda _: None,  # scores of answers
    "ElectraForPreTraining": replaced_tokens,
    "FunnelForPreTraining": replaced_tokens,
    "SplinterForPreTraining": recurring_spans,
    "AlbertForPreTraining": partial(pretraining, pair_label="sentence_order_label", pair_logits="sop_logits"),
}

# The first suffix that fits the class name counts.
_BY_SUFFIX: dict[str, Callable[[nn.Module], HeadLoss]] = {
    "ForCausalLM": causal_lm,
    "LMHeadModel": causal_lm,
    "DoubleHeadsModel": causal_lm,
    "ForMaskedLM": masked_lm,
    "MTModel": conditional_generation,
    "ForConditionalGeneration": conditional_generation,
    "ForTextToText": conditional_generation,
    "ForSpeechToText": conditional_generation,
    "ForTextToSpeech": conditional_generation,
    "ForPreTraining": pretraining,
    "ForNextSentencePrediction": plain_classes,
    "ForTokenClassification": partial(plain_classes, per_token=True),
    "ForMultipleChoice": plain_classes,
    "ForAudioClassification": plain_classes,
    "ForAudioFrameClassification": mean_of_samples,
    "ForXVector": mean_of_samples,
    "ForCTC": connectionist,
    "ForVideoClassification": sequence_classification,
    "ForSequenceClassification": sequence_classification,
    "ForImageClassification": sequence_classification,
    "BeitForMaskedImageModeling": masked_visual_tokens,
    "ForMaskedImageModeling": masked_pixels,
    "ForSemanticSegmentation": segmentation,
    "ForQuestionAnswering": question_answering,
    "ForQuestionAnsweringSimple": question_answering,
    "CLIPModel": lambda _: ContrastiveLoss(),
}
