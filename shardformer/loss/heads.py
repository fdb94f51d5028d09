"""Usual losses of transformers' heads, by the suffix of the class name.

transformers chooses in the same way: its `LOSS_MAPPING` maps suffixes of class names to loss functions. A family whose
heads have other losses declares them in the `head_losses` of its policy or plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from shardformer.loss.perception import connectionist, detection, masked_pixels, mean_of_samples, segmentation
from shardformer.loss.terms import HeadLoss
from shardformer.loss.text import (
    causal_lm,
    conditional_generation,
    masked_lm,
    plain_classes,
    pretraining,
    question_answering,
    sequence_classification,
)

HeadLossBuilder = Callable[[nn.Module], HeadLoss | None]
HeadLosses = Mapping[str, HeadLossBuilder]

USUAL_HEAD_LOSSES: HeadLosses = {
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
    "ForMaskedImageModeling": masked_pixels,
    "ForSemanticSegmentation": segmentation,
    "ForObjectDetection": detection,
    "ForSegmentation": detection,
    "ForQuestionAnswering": question_answering,
    "ForQuestionAnsweringSimple": question_answering,
}


def matching_key(name: str, losses: HeadLosses) -> str | None:
    """Return the longest key in `losses` that the class name ends in; None if there is none."""
    return max((key for key in losses if name.endswith(key)), key=len, default=None)


def own_loss(_: nn.Module) -> None:
    """Return None: the loss is left to the model's forward."""


def with_further_entries(build: HeadLossBuilder, *entries: str) -> HeadLossBuilder:
    """Return a builder for a head whose forward computes another loss if the batch contains one of `entries`."""
    return partial(_build_with_further_entries, build, entries)


def _build_with_further_entries(build: HeadLossBuilder, entries: tuple[str, ...], model: nn.Module) -> HeadLoss | None:
    loss = build(model)
    if loss is not None:
        loss.further_entries = entries
    return loss
