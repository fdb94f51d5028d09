"""Losses of transformers' heads: the usual ones by the suffix of the class name, and those of a model's own forward.

transformers chooses in the same way: its `LOSS_MAPPING` maps suffixes of class names to loss functions. A family whose
heads have other losses declares them in the `head_losses` of its policy or plan.

A forward that computes its loss itself returns the mean over the labels of one micro-batch, or a sum. The mean is
weighted by their number, so that the micro-batches of all replicas give the mean over all labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.loss import perception, text
from shardformer.loss.terms import IGNORE_INDEX, Batch, HeadLoss, LossTerm, zero_of

HeadLossBuilder = Callable[[nn.Module], HeadLoss | None]
HeadLosses = Mapping[str, HeadLossBuilder]

USUAL_HEAD_LOSSES: HeadLosses = {
    "ForCausalLM": text.causal_lm,
    "LMHeadModel": text.causal_lm,
    "DoubleHeadsModel": text.causal_lm,
    "ForMaskedLM": text.masked_lm,
    "MTModel": text.conditional_generation,
    "ForConditionalGeneration": text.conditional_generation,
    "ForTextToText": text.conditional_generation,
    "ForSpeechToText": text.conditional_generation,
    "ForTextToSpeech": text.conditional_generation,
    "ForPreTraining": text.pretraining,
    "ForNextSentencePrediction": text.plain_classes,
    "ForTokenClassification": partial(text.plain_classes, per_token=True),
    "ForMultipleChoice": text.plain_classes,
    "ForAudioClassification": text.plain_classes,
    "ForAudioFrameClassification": perception.mean_of_samples,
    "ForXVector": perception.mean_of_samples,
    "ForCTC": perception.connectionist,
    "ParakeetForRNNT": perception.transducer,
    "ForVideoClassification": text.sequence_classification,
    "ForSequenceClassification": text.sequence_classification,
    "ForImageClassification": text.sequence_classification,
    "ForMaskedImageModeling": perception.masked_pixels,
    "ForSemanticSegmentation": perception.segmentation,
    "ForObjectDetection": perception.detection,
    "ForSegmentation": perception.detection,
    "ForQuestionAnswering": text.question_answering,
    "ForQuestionAnsweringSimple": text.question_answering,
}
# Of forwards that call no `loss_function`.
OWN_HEAD_LOSSES: HeadLosses = {
    **dict.fromkeys(("MaskFormerForInstanceSegmentation", "ForUniversalSegmentation"), perception.classified_masks),
    **dict.fromkeys(("LayoutLMv2ForQuestionAnswering", "ReformerForQuestionAnswering"), text.question_answering),
    "ForSemanticSegmentation": perception.segmentation,
    "Sapiens2ForPoseEstimation": perception.weighted_heatmaps,
}
# Class, or the start of its name -> what its own loss is, which the losses of parts of a batch do not tell.
_NO_MEANS: Mapping[str, str] = {
    "GLPNForDepthEstimation": "it is the root of a mean over all pixels",
    "Wav2Vec2ConformerForPreTraining": "it compares the codes of all masked frames",
    "Wav2Vec2ForPreTraining": "it compares the codes of all masked frames",
}
# The same -> entries of the batch that means of its own loss are over, and the value that does not count.
_OBSERVED = (("future_observed_mask", 0.0),)
_COUNTED: Mapping[str, Sequence[tuple[str, float]]] = {
    **dict.fromkeys(("Autoformer", "Informer", "TimeSeriesTransformer"), _OBSERVED),
    "BrosSpadeEE": (("bbox_first_token_mask", 0.0), ("attention_mask", 0.0)),
    "CsmForConditionalGeneration": (("labels", -101.0),),  # frames of which the first code alone is predicted
    "FastSpeech2Conformer": (("spectrogram_labels", -100.0), ("attention_mask", 0.0)),
    "SpeechT5ForTextToSpeech": (("labels", -100.0), ("attention_mask", 0.0)),
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


def mean_over_labels(_: nn.Module, skipped: int = 0) -> HeadLoss:
    """Return the loss of a forward that averages over the labels [..., seq] that are not -100.

    Args:
        skipped: number of labels of each sequence that nothing predicts: 1 if each token predicts the next one.
    """

    def of_tokens(labels: Tensor, _: Batch) -> Tensor:
        return labels[..., skipped:]

    term = LossTerm("labels", lambda labels, _: _count(labels), _total, is_input=True, prepare=of_tokens)
    return _of_forward(HeadLoss(term))


def sum_over_samples(_: nn.Module) -> HeadLoss:
    """Return the loss of a forward that adds up the losses of its samples (RAG)."""

    def total(outputs: Mapping[str, Any], _: Tensor) -> Tensor:
        return outputs["loss"]

    term = LossTerm("labels", lambda labels, _: torch.tensor(len(labels)), total, is_sum=True, is_input=True)
    return _of_forward(HeadLoss(term))


FORWARD_LOSSES = {
    "mean_of_labels": mean_over_labels,
    "mean_of_next_labels": partial(mean_over_labels, skipped=1),
    "sum": sum_over_samples,
}


USUAL = "usual"
LOSSES = (*FORWARD_LOSSES, USUAL)  # the usual one reads logits that may be sharded, which a forward may not expect


def head_loss_of_kind(name: str, kind: str) -> HeadLossBuilder:
    """Return a class's loss, of a kind in `LOSSES`, for its usual labels; KeyError if it has no usual loss."""
    build = USUAL_HEAD_LOSSES[matching_key(name, USUAL_HEAD_LOSSES)] if kind == USUAL else FORWARD_LOSSES[kind]
    return partial(_of_known_labels, build)


def other_loss_of(model: nn.Module) -> str | None:
    """Return what the loss of the model's own forward is if it is no mean over a batch; None if it is one."""
    return _by_name(model, _NO_MEANS)


def counted_by(model: nn.Module) -> list[tuple[str, float]]:
    """Return entries of a batch that means of the model's own loss may be over, each with the value left out.

    Values that are integers are left out of entries of integers alone: labels of a regression may be -100.0.
    """
    labels = {"labels", *(name for name in inspect.signature(model.forward).parameters if "label" in name)}
    return [*((name, IGNORE_INDEX) for name in sorted(labels)), *(_by_name(model, _COUNTED) or ())]


def _by_name(model: nn.Module, table: Mapping[str, Any]) -> Any:
    """Return the entry of the model's class, or of a base class."""
    names = (each.__name__ for each in type(model).__mro__)
    return next((value for name in names for key, value in table.items() if name.startswith(key)), None)


def _of_known_labels(build: HeadLossBuilder, model: nn.Module) -> HeadLoss | None:
    loss = build(model)
    if loss is not None:
        read = [name for name in inspect.signature(model.forward).parameters if "label" in name]
        known = {term.labels for term in loss.terms}
        loss.further_entries = (*loss.further_entries, *(name for name in read if name not in known))
    return loss


def _of_forward(loss: HeadLoss) -> HeadLoss:
    loss.reads_whole_logits = True
    return loss


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum()


def _total(outputs: Mapping[str, Any], labels: Tensor) -> Tensor:
    count = _count(labels)
    if count:
        return outputs["loss"] * count
    # The mean over no labels is NaN; the parameters get gradients of zero.
    others = (value for name, value in outputs.items() if name != "loss" and isinstance(value, Tensor))
    return zero_of(next(value for value in others if value.is_floating_point()))
