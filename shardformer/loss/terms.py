"""The loss of each kind of head, as sums and counts.

transformers computes a mean inside `forward`. A mean over one micro-batch on one rank says nothing about the global
mean when counts differ (ignored labels, a short last batch), so here a loss is a sum and a count: counts depend on
the labels alone, are known before the forward pass, and are added up over micro-batches and data-parallel ranks. The
sums read vocabulary-parallel logits where they lie. Definitions follow transformers' `loss/loss_utils.py` and, for
BERT's older heads, their `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardformer.loss.routers import RouterLoss

Batch = Mapping[str, Any]
IGNORE_INDEX = -100
# What transformers' loss functions take beside labels, where a forward hands its keywords on to them.
DIVISOR, IGNORED, SHIFTED = LOSS_KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")


@dataclass(frozen=True)
class LossTerm:
    """One mean in a head's loss.

    Attributes:
        labels: the key of the batch that holds the labels.
        count: (labels, batch) -> how many values the mean is over (0-d).
        total: (outputs, labels) -> sum of the values (0-d, differentiable).
        weight: factor of this mean in the loss.
        is_input: whether the model's forward reads the labels, too.
        epsilon: added to the global count.
        is_sum: whether the head adds the values up in the place of a mean.
        prepare: (labels, batch) -> the labels as `count` and `total` take them; None for as they are.
        per_token: whether these are [batch, seq], each read beside the output of its own token alone.
        keywords: which of `LOSS_KEYWORDS` it takes from the batch.
    """

    labels: str
    count: Callable[[Tensor, Batch], Tensor]
    total: Callable[..., Tensor]
    weight: float = 1.0
    is_input: bool = False
    epsilon: float = 0.0
    is_sum: bool = False
    prepare: Callable[[Tensor, Batch], Tensor] | None = None
    per_token: bool = False
    keywords: tuple[str, ...] = ()

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of a batch, as `count` and `total` take them: -100 where ignored."""
        labels = batch[self.labels]
        labels = labels if self.prepare is None else self.prepare(labels, batch)
        ignored = batch.get(IGNORED) if IGNORED in self.keywords else None
        if ignored is None:
            return labels
        # What is ignored by default is a label out of range for who ignores another one.
        return labels.masked_fill(labels == IGNORE_INDEX, -1).masked_fill(labels == ignored, IGNORE_INDEX)

    def factor(self, batch: Batch, global_count: Tensor) -> Tensor:
        """What the sum of the values is multiplied by in the loss (0-d)."""
        divisor = batch.get(DIVISOR) if DIVISOR in self.keywords else None
        if divisor is not None:
            return self.weight / torch.as_tensor(divisor, device=global_count.device).to(global_count).reshape(())
        if self.is_sum:
            return torch.full_like(global_count, self.weight)
        return self.weight / (global_count + self.epsilon).clamp(min=1.0)


class HeadLoss:
    """The loss that a head computes when labels are given: the weighted sum of a few means.

    Args:
        terms: the means; all of their labels have to be there, as in transformers.
        function: the function of transformers' `loss_utils` that computes the same, for forwards that call one.
        decoder_inputs: labels -> what an encoder-decoder reads where it is given labels alone.
        routers: the load-balancing loss that comes to it.

    Attributes:
        couples_samples: whether a sample's loss depends on the other samples of its batch, which then cannot be cut.
        reads_keywords: whether the head's forward hands `LOSS_KEYWORDS` on to its loss function.
        further_entries: of a batch that the head's forward reads for its loss where they are given, and this does not.
    """

    couples_samples = False
    further_entries: tuple[str, ...] = ()

    def __init__(
        self,
        *terms: LossTerm,
        function: str | None = None,
        decoder_inputs: Callable[[Tensor], Tensor] | None = None,
        routers: RouterLoss | None = None,
    ) -> None:
        self.terms, self.function, self.decoder_inputs, self.routers = terms, function, decoder_inputs, routers
        self.reads_keywords = False

    @property
    def label_keys(self) -> tuple[str, ...]:
        """The labels that the model's forward does without."""
        return tuple(term.labels for term in self.terms if not term.is_input)

    def applies_to(self, batch: Batch) -> bool:
        """Whether the batch has all the labels; without them transformers returns no loss."""
        return all(batch.get(term.labels) is not None for term in self.terms)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """What the model is given: the batch without labels, and what it would have made of them."""
        inputs = {key: value for key, value in batch.items() if key not in self.label_keys}
        given = any(inputs.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds"))
        if self.decoder_inputs is not None and not given and batch.get("labels") is not None:
            inputs["decoder_input_ids"] = self.decoder_inputs(batch["labels"])
        return inputs

    def unread(self, batch: Batch) -> str | None:
        """An entry of the batch that the model's loss reads, and this one does not."""
        further = next((name for name in self.further_entries if batch.get(name) is not None), None)
        if further is not None:
            return further
        asked = [name for name in LOSS_KEYWORDS if self.reads_keywords and batch.get(name) is not None]
        return next((name for name in asked if any(name not in term.keywords for term in self.terms)), None)

    def counts(self, batch: Batch) -> Tensor:
        """[terms], float64: how many values each mean is over in this batch."""
        batch = self._seen(batch)
        return torch.stack([term.count(term.labels_of(batch), batch).double() for term in self.terms])

    def divisor(self, batch: Batch) -> Any:
        """What the user divides the sum over the global batch by, where he says it and the model reads it."""
        return batch.get(DIVISOR) if self.reads_keywords else None

    @property
    def per_token(self) -> bool:
        """Whether a part of the tokens of a sequence has a loss of its own, which the parts add up to."""
        return all(term.per_token for term in self.terms) and not self.couples_samples

    def weighted_sum(
        self, outputs: Any, batch: Batch, global_counts: Tensor, part: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """This batch's share of the global loss: sum of weight * total / global count (0-d).

        Args:
            part: labels [batch, seq] -> those of the tokens that `outputs` are of, where these are not all.
        """
        batch = self._seen(batch)
        labels = [term.labels_of(batch) for term in self.terms]
        labels = labels if part is None else [part(each) for each in labels]
        totals = [term.total(outputs, each) for term, each in zip(self.terms, labels, strict=True)]
        factors = [term.factor(batch, count) for term, count in zip(self.terms, global_counts, strict=True)]
        return sum(total * factor.to(total.dtype) for total, factor in zip(totals, factors, strict=True))

    def _seen(self, batch: Batch) -> Batch:
        """The batch as the model's loss sees it."""
        if self.reads_keywords:
            return batch
        return {name: value for name, value in batch.items() if name not in LOSS_KEYWORDS}
