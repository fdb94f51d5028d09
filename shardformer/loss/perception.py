"""Losses of image and sound heads, and of those that match predictions with targets of each image (DETR, MaskFormer).

Their labels are lists with the targets of each image. transformers divides most parts of the loss by the number of
boxes or masks of the batch; the loss of classes is often a mean over queries, weighted by their classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.loss.terms import IGNORE_INDEX, Batch, HeadLoss, LossTerm, divisor_of_masks, zero_of
from shardformer.loss.text import not_ignored, token_sum
from shardformer.utils.source import uses

Targets = Sequence[Mapping[str, Tensor]]
_BY_BOXES = (
    "DeformableDetrForObjectDetectionLoss",
    "DeformableDetrForSegmentationLoss",
    "GroundingDinoForObjectDetectionLoss",
    "LwDetrForObjectDetectionLoss",
)
_BY_QUERIES = ("ForObjectDetectionLoss", "ForSegmentationLoss")
_CLASSES = "loss_ce"  # and "loss_ce_0", … of the decoder's layers
_CLASSES_OF_MASKS = "loss_cross_entropy"


def detection(model: nn.Module) -> HeadLoss | None:
    """Return the loss of a detector; None if parts of it are divided by what a part of the batch does not tell."""
    name = getattr(model.loss_function, "__name__", "")
    if name in _BY_BOXES:
        return _with_parts(_by_boxes(model))
    if name not in _BY_QUERIES:
        return None

    def by_query(outputs: Any, labels: Targets) -> Tensor:
        return _classes(outputs) * _weights(model, labels)

    def by_box(outputs: Any, labels: Targets) -> Tensor:
        return (outputs.loss - _classes(outputs)) * max(float(_boxes(labels, {})), 1.0)  # what the model has divided by

    return _with_parts(
        LossTerm("labels", lambda labels, _: torch.tensor(_weights(model, labels)), by_query, is_input=True),
        LossTerm("labels", _boxes, by_box, is_input=True),
    )


def _with_parts(*terms: LossTerm) -> HeadLoss:
    loss = HeadLoss(*terms)
    loss.has_parts = True
    return loss


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


def _weights(model: nn.Module, labels: Targets) -> float:
    """Return the sum of the weights of all queries: 1 for one with a box, `eos_coefficient` for the others."""
    queries = getattr(model.config, "num_detection_tokens", None) or model.config.num_queries
    return _sum_of_weights([target["class_labels"] for target in labels], queries, model.config.eos_coefficient)


def _sum_of_weights(labels: Sequence[Tensor], queries: int, of_others: float) -> float:
    matched = sum(min(len(each), queries) for each in labels)  # of an image with more targets, some match none
    return matched + of_others * (len(labels) * queries - matched)


def _classes(outputs: Any) -> Tensor:
    return sum(value for name, value in outputs.loss_dict.items() if name.startswith(_CLASSES))


def classified_masks(model: nn.Module) -> HeadLoss | None:
    """Return the loss of a model that classifies masks (MaskFormer); None if it also compares samples (OneFormer)."""
    config, criterion = model.config, getattr(model, "criterion", None)
    compares = getattr(config, "is_training", False) and config.contrastive_temperature is not None
    if compares or not hasattr(criterion, "get_num_masks"):
        return None
    queries = getattr(config, "decoder_config", config).num_queries

    def weights(labels: Sequence[Tensor]) -> float:
        return _sum_of_weights(labels, queries, criterion.eos_coef)

    def of_classes() -> Tensor:
        kept = (each for losses in criterion.kept_losses for each in losses.items())
        return sum(loss for name, loss in kept if name.startswith(_CLASSES_OF_MASKS))

    def by_query(_: Any, labels: Sequence[Tensor]) -> Tensor:
        return of_classes() * weights(labels)

    def by_mask(outputs: Any, labels: Sequence[Tensor]) -> Tensor:
        rest = outputs.loss - of_classes()
        criterion.kept_losses.clear()  # which hold the graph
        return rest * divisor_of_masks(labels)

    return HeadLoss(
        LossTerm("class_labels", lambda labels, _: torch.tensor(weights(labels)), by_query, is_input=True),
        LossTerm("mask_labels", lambda labels, _: torch.tensor(float(sum(map(len, labels)))), by_mask, is_input=True),
    )


def mean_of_samples(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that average over samples of equal weight: the model's mean is turned into a sum."""
    return HeadLoss(LossTerm("labels", _samples, _sum_of_mean, is_input=True))


def connectionist(model: nn.Module) -> HeadLoss:
    """Return the CTC loss: a sum over samples, or a mean over samples of each sample's loss per label."""
    if model.config.ctc_loss_reduction == "sum":
        return HeadLoss(LossTerm("labels", _samples, lambda outputs, _: outputs.loss, is_input=True, is_sum=True))
    return mean_of_samples(model)


def transducer(model: nn.Module) -> HeadLoss:
    """Return Parakeet's loss of a transducer: a sum over samples, divided by the labels that are not blank."""

    def count(labels: Tensor, _: Batch) -> Tensor:
        return (labels != model.config.blank_token_id).sum()

    def total(outputs: Any, labels: Tensor) -> Tensor:
        if not count(labels, {}):
            raise ValueError(
                f"all {len(labels)} samples of a part of the batch have no labels but blanks, and transformers divides "
                "their loss by 0; use fewer micro-batches or replicas, or leave such samples out"
            )
        return outputs.loss * count(labels, {})

    return HeadLoss(LossTerm("labels", count, total, is_input=True), function="ParakeetForRNNTLoss")


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
    """Return the loss of heads that classify pixels, or tell one class from the rest by a mean over all pixels."""
    config = model.config
    ignored = getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", 255))
    counts_all = config.num_labels == 1 and uses(type(model).forward, "valid_mask")  # SegFormer

    def count(labels: Tensor, _: Batch) -> Tensor:
        return labels.new_tensor(labels.numel()) if counts_all else (labels != ignored).sum()

    def total(outputs: Any, labels: Tensor) -> Tensor:
        # The outputs lack the logits of the auxiliary head: turn the model's mean into a sum.
        pixels = int(count(labels, {}))
        return outputs.loss * pixels if pixels else zero_of(outputs.logits)

    return HeadLoss(LossTerm("labels", count, total, is_input=True))


def weighted_heatmaps(_: nn.Module) -> HeadLoss:
    """Return Sapiens2's loss of poses: squares weighted by `label_weights`, divided by the sum of the weights."""

    def weights(labels: Tensor, batch: Batch) -> Tensor:
        given = batch.get("label_weights")
        return torch.ones_like(labels) if given is None else given

    def total(outputs: Any, weights: Tensor) -> Tensor:
        return outputs.loss * weights.sum() if weights.any() else zero_of(outputs.heatmaps)

    return HeadLoss(LossTerm("labels", lambda given, _: given.sum(), total, is_input=True, prepare=weights))
