"""Losses of detectors, which match predicted boxes with those of each image (DETR, Carion et al. 2020).

Their labels are a list with a dict of targets for each image. transformers divides most parts of the loss by the number
of boxes of the batch; DETR's own loss of classes is a mean over queries, weighted by their classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.loss.terms import Batch, HeadLoss, LossTerm

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
