"""Lookup of the loss of a model's head by class name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from shardformer.loss.audio import connectionist, mean_of_samples
from shardformer.loss.forward_source import adds_to_loss, calls_loss_function, passes_keywords
from shardformer.loss.image import ContrastiveLoss, masked_pixels, masked_visual_tokens, segmentation
from shardformer.loss.replaced import own_loss_reason
from shardformer.loss.routers import routers_are_asked
from shardformer.loss.terms import HeadLoss, LossTerm
from shardformer.loss.text import (
    causal_lm,
    causal_lm_of_tokens,
    classes_of_tokens,
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
from shardformer.policies.plans.declared import declared_plan_of
from shardformer.policies.registry import supported_classes

__all__ = ["HeadLoss", "LossTerm", "head_loss_of", "known_head", "own_loss_reason", "routers_are_asked"]


def head_loss_of(model: nn.Module) -> HeadLoss | None:
    """Return the loss of the model's head by its class name; None if the model's own loss must be used.

    It is None for a head (or a bare model) without a loss, and for a head whose loss may differ from what its name
    implies: its forward is the user's own, or it does not call transformers' `loss_function` and the family's policy
    does not set `writes_usual_losses`.
    """
    name = known_head(type(model))
    build = None if name is None else _builder(name)
    loss = None if build is None else build(model)
    if loss is not None:
        loss.reads_keywords = passes_keywords(type(model).forward)
    return loss


def _builder(name: str) -> Callable[[nn.Module], HeadLoss | None] | None:
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((build for suffix, build in _BY_SUFFIX.items() if name.endswith(suffix)), None)


def known_head(cls: type) -> str | None:
    """Return the name of the transformers (or shardformer) head class whose forward `cls` uses; None if unknown."""
    definer = next(each for each in cls.__mro__ if "forward" in vars(each))
    if inspect.unwrap(definer.forward).__module__ != definer.__module__:
        return None  # the forward has been replaced
    if definer.__module__.startswith("shardformer."):
        return definer.__name__
    if definer.__module__.startswith("transformers_modules."):  # remote code of a family in this package
        own = {name.rpartition(".")[2] for name in supported_classes() if name.startswith("shardformer.")}
        return definer.__name__ if definer.__name__ in own else None
    if not definer.__module__.startswith("transformers."):
        return None
    head = next(each for each in cls.__mro__ if each.__module__.startswith("transformers."))
    policy = supported_classes().get(f"{head.__module__}.{head.__name__}")
    is_tested = (
        (policy is not None and vars(policy).get("writes_usual_losses", False))
        or declared_plan_of(head) is not None
        or head.__module__.split(".")[2] in _USUAL
    )
    if calls_loss_function(definer.forward):
        return None if adds_to_loss(definer.forward) and head.__name__ not in _BY_NAME else head.__name__
    return head.__name__ if is_tested else None


# Families with a transformers plan whose heads compute the usual losses in their own forward.
_USUAL = (
    "eurobert",
    "gemma3",
    "granite_speech",
    "granite_speech_plus",
    "imagegpt",
    "qwen2_audio",
    "qwen3_5",
    "ultrabert",
    "ultravbert",
)
# The decoders of these encoder-decoders take labels that are already shifted to the next token.
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

# Heads with a special loss, which is left to their forward.
_OWN = (
    "BrosSpadeEEForTokenClassification",
    "BrosSpadeELForTokenClassification",
    "ClvpModelForConditionalGeneration",
    "CsmDepthDecoderForCausalLM",
    "GitForCausalLM",
    "HieraForPreTraining",
    "MoshiForConditionalGeneration",
    "RoCBertForPreTraining",
    "TapasForQuestionAnswering",
    "UniSpeechForPreTraining",
    "UniSpeechSatForPreTraining",
    "ViltForQuestionAnswering",
    "VideoMAEForPreTraining",
    "VisualBertForPreTraining",
    "VisualBertForQuestionAnswering",
    "Wav2Vec2ConformerForPreTraining",
    "Wav2Vec2ForPreTraining",
    # Beam search over answer spans.
    "FlaubertForQuestionAnswering",
    "XLMForQuestionAnswering",
    "XLNetForQuestionAnswering",
)


def _with_further(build: Callable[..., HeadLoss], *entries: str, **options: Any) -> Callable[[nn.Module], HeadLoss]:
    """Make a loss for a head whose forward computes another loss if the batch contains one of `entries`."""

    def loss(model: nn.Module) -> HeadLoss:
        head_loss = build(model, **options)
        head_loss.further_entries = entries
        return head_loss

    return loss


# Heads whose loss is not the usual one for their suffix.
_BY_NAME: dict[str, Callable[[nn.Module], HeadLoss | None]] = {
    **{f"{family}ForCausalLM": masked_lm for family in _NOT_SHIFTED},
    **{f"Blip2{head}": language_of_images for head in ("ForConditionalGeneration", "Model")},
    "BertGenerationDecoder": causal_lm,
    **dict.fromkeys(("FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"), masked_lm),
    **dict.fromkeys(_OWN, lambda _: None),
    **{f"{family}ForTokenClassification": classes_of_tokens for family in ("BioGpt", "Mra", "XLMRobertaXL", "Yoso")},
    **{
        f"{family}ForConditionalGeneration": causal_lm_of_tokens
        for family in ("GraniteSpeech", "GraniteSpeechPlus", "Qwen2Audio")
    },
    "ASTForAudioClassification": sequence_classification,
    "BambaForCausalLM": lambda model: None if model.z_loss_coefficient else causal_lm(model),
    "BrosForTokenClassification": _with_further(plain_classes, "bbox_first_token_mask", per_token=True),
    "LukeForMaskedLM": _with_further(masked_lm, "entity_labels"),
    "ImageGPTForCausalImageModeling": causal_lm,
    "VibeVoiceForConditionalGeneration": _with_further(conditional_generation, "acoustic_loss_mask"),
    "ElectraForPreTraining": replaced_tokens,
    "FunnelForPreTraining": replaced_tokens,
    "SplinterForPreTraining": recurring_spans,
    "AlbertForPreTraining": partial(pretraining, pair_label="sentence_order_label", pair_logits="sop_logits"),
}

# The first suffix that matches the class name is used.
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
