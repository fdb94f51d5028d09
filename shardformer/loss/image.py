"""Losses of image heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardformer.cross_entropy.vocab_parallel import cross_entropy_sum
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


def contrastive(_: nn.Module) -> HeadLoss:
    """Return CLIP's contrastive loss."""
    return ContrastiveLoss()


class ContrastiveLoss(HeadLoss):
    """CLIP's contrastive loss: each text must match its image among the images of the batch, and vice versa."""

    couples_samples = True
    coupled_outputs = ("logits_per_image", "logits_per_text")

    def __init__(self) -> None:
        def total(outputs: Any, _: Any) -> Tensor:
            logits = outputs.logits_per_text  # [texts, images]
            pairs = torch.arange(len(logits), device=logits.device)
            return (cross_entropy_sum(logits, pairs) + cross_entropy_sum(logits.t(), pairs)) / 2

        def count(_: Any, batch: Batch) -> Tensor:
            texts = batch["input_ids"]
            return torch.full((), len(texts), device=texts.device)

        super().__init__(LossTerm("return_loss", count, total))

    def applies_to(self, batch: Batch) -> bool:
        """Return whether the batch asks for the loss; there are no labels."""
        return bool(batch.get("return_loss"))
