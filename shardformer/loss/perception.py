"""Losses of image and sound heads, and of detectors, which match predicted boxes with those of each image (DETR).

Their labels are a list with a dict of targets for each image. transformers divides most parts of the loss by the number
of boxes of the batch; DETR's own loss of classes is a mean over queries, weighted by their classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.loss.terms import IGNORE_INDEX, Batch, HeadLoss, LossTerm
from shardformer.loss.text import not_ignored, token_sum

Targets = Sequence[Mapping[str, Tensor]]
_BY_BOXES = (
    "DeformableDetrForObjectDetectionLoss",
    "DeformableDetrForSegmentationLoss",
    "GroundingDinoForObjectDetectionLoss",
    "LwDetrForObjectDetectionLoss",
)
_BY_QUERIES = ("ForObjectDetectionLoss", "ForSegmentationLoss")
_CLASSES = "loss_ce"  # and "loss_ce_0", … of the decoder's layers


def detection(model: nn.Module) -> HeadLoss | None:
    """Return the loss of a detector; None if parts of it are divided by what a part of the batch does not tell."""
    name = getattr(model.loss_function, "__name__", "")
    if name in _BY_BOXES:
        return HeadLoss(_by_boxes(model))
    if name not in _BY_QUERIES:
        return None

    def by_query(outputs: Any, labels: Targets) -> Tensor:
        return _classes(outputs) * _weights(model, labels)

    def by_box(outputs: Any, labels: Targets) -> Tensor:
        return (outputs.loss - _classes(outputs)) * _divisor(labels)

    return HeadLoss(
        LossTerm("labels", lambda labels, _: torch.tensor(_weights(model, labels)), by_query, is_input=True),
        LossTerm("labels", _boxes, by_box, is_input=True),
    )


def _by_boxes(model: nn.Module) -> LossTerm:
    """Return the loss that is divided by the number of boxes; in training each group of queries counts them."""
    groups = getattr(model.config, "group_detr", 1)

    def copies() -> int:
        return groups if model.training else 1

    def count(labels: Targets, batch: Batch) -> Tensor:
        return _boxes(labels, batch) * copies()

    def total(outputs: Any, labels: Targets) -> Tensor:
        return outputs.loss * max(float(count(labels, {})), 1.0)

    return LossTerm("labels", count, total, is_input=True)


def _boxes(labels: Targets, _: Batch) -> Tensor:
    return torch.tensor(float(sum(len(target["class_labels"]) for target in labels)))


def _divisor(labels: Targets) -> float:
    """Return what the model has divided by: the number of boxes, at least 1."""
    return max(float(_boxes(labels, {})), 1.0)


def _weights(model: nn.Module, labels: Targets) -> float:
    """Return the sum of the weights of all queries: 1 for one with a box, `eos_coefficient` for the others."""
    config, boxes = model.config, float(_boxes(labels, {}))
    queries = getattr(config, "num_detection_tokens", None) or config.num_queries
    return boxes + config.eos_coefficient * (len(labels) * queries - boxes)


def _classes(outputs: Any) -> Tensor:
    return sum(value for name, value in outputs.loss_dict.items() if name.startswith(_CLASSES))


def mean_of_samples(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that average over samples of equal weight: the model's mean is turned into a sum."""
    return HeadLoss(LossTerm("labels", _samples, _sum_of_mean, is_input=True))


def connectionist(model: nn.Module) -> HeadLoss:
    """Return the CTC loss: a sum over samples, or a mean over samples of each sample's loss per label."""
    if model.config.ctc_loss_reduction == "sum":
        return HeadLoss(LossTerm("labels", _samples, lambda outputs, _: outputs.loss, is_input=True, is_sum=True))
    return mean_of_samples(model)


def _samples(labels: Tensor, _: Batch) -> Tensor:
    return labels.new_tensor(len(labels))


def _sum_of_mean(outputs: Any, labels: Tensor) -> Tensor:
    return outputs.loss * len(labels)


def masked_pixels(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that reconstruct masked pixels."""
    config = model.config
    epsilon = 1e-5  # transformers divides by the number of masked pixels plus this

    def count(masked: Tensor, _: Batch) -> Tensor:
        return masked.sum() * config.patch_size**2

    def total(outputs: Any, masked: Tensor) -> Tensor:
        # The model has already compared the pixels: turn its mean into a sum.
        return outputs.loss * (count(masked, {}) + epsilon)

    return HeadLoss(LossTerm("bool_masked_pos", count, total, is_input=True, epsilon=epsilon))


def masked_visual_tokens(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that predict the visual tokens of masked patches."""

    def of_patches(labels: Tensor, batch: Batch) -> Tensor:
        """Return labels as [rows, patches], also from transformers' list of the masked patches of all samples."""
        if labels.dim() == 2:
            return labels
        masked = batch["bool_masked_pos"].bool()  # [rows, patches]
        if labels.numel() != int(masked.sum()):
            raise ValueError(
                f"labels is a list of {labels.numel()} masked patches where bool_masked_pos marks {int(masked.sum())}; "
                f"give one for each of them, or labels of shape [rows, patches], {IGNORE_INDEX} where nothing is masked"
            )
        return labels.new_full(masked.shape, IGNORE_INDEX).masked_scatter(masked, labels)

    def total(outputs: Any, labels: Tensor) -> Tensor:
        return token_sum(model, "logits", outputs, labels)

    return HeadLoss(LossTerm("labels", not_ignored, total, prepare=of_patches))


def segmentation(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that classify pixels."""

    def count(labels: Tensor, _: Batch) -> Tensor:
        return (labels != model.config.semantic_loss_ignore_index).sum()

    def total(outputs: Any, labels: Tensor) -> Tensor:
        # The outputs lack the logits of the auxiliary head: turn the model's mean into a sum.
        pixels = int(count(labels, {}))
        return outputs.loss * pixels if pixels else outputs.logits.sum() * 0.0

    return HeadLoss(LossTerm("labels", count, total, is_input=True))
