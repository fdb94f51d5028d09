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

Batch = Mapping[str, Any]
IGNORE_INDEX = -100


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

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of a batch, as `count` and `total` take them."""
        labels = batch[self.labels]
        return labels if self.prepare is None else self.prepare(labels, batch)


class HeadLoss:
    """The loss that a head computes when labels are given: the weighted sum of a few means.

    Args:
        terms: the means; all of their labels have to be there, as in transformers.
        decoder_inputs: labels -> what an encoder-decoder reads where it is given labels alone.

    Attributes:
        couples_samples: whether a sample's loss depends on the other samples of its batch, which then cannot be cut.
    """

    couples_samples = False

    def __init__(self, *terms: LossTerm, decoder_inputs: Callable[[Tensor], Tensor] | None = None) -> None:
        self.terms, self.decoder_inputs = terms, decoder_inputs

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

    def counts(self, batch: Batch) -> Tensor:
        """[terms], float64: how many values each mean is over in this batch."""
        return torch.stack([term.count(term.labels_of(batch), batch).double() for term in self.terms])

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
        weights, epsilons = torch.tensor([(term.weight, term.epsilon) for term in self.terms]).to(global_counts).T
        sums = torch.tensor([term.is_sum for term in self.terms], device=global_counts.device)
        factors = torch.where(sums, weights, weights / (global_counts + epsilons).clamp(min=1.0))
        labels = [term.labels_of(batch) for term in self.terms]
        labels = labels if part is None else [part(each) for each in labels]
        totals = torch.stack([term.total(outputs, each) for term, each in zip(self.terms, labels, strict=True)])
        return (totals * factors.to(totals.dtype)).sum()
