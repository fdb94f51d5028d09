"""Losses of image heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardformer.loss.terms import IGNORE_INDEX, Batch, HeadLoss, LossTerm
from shardformer.loss.text import not_ignored, token_sum


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
        return token_sum(model, outputs.logits, labels)

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
