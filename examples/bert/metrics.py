"""Accuracy, F1 and loss from counts, which ranks can add up exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Metrics:
    """Of one evaluation: `loss` is the mean over `samples`; F1 is that of label 1."""

    accuracy: float
    f1: float
    loss: float
    samples: int

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return asdict(self)


class Counts:
    """What an evaluation has seen so far.

    `values` [6]: true positives, false positives, false negatives, correct ones, samples, sum of losses.

    Args:
        device: where to count; that of the logits saves a copy a batch.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.values = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count one batch: logits [B, 2], labels [B]; B may be 0."""
        labels = labels.to(logits.device)
        predicted = logits.argmax(dim=-1)
        outcomes = (
            (predicted == 1) & (labels == 1),
            (predicted == 1) & (labels == 0),
            (predicted == 0) & (labels == 1),
            predicted == labels,
            torch.ones_like(labels),
        )
        sums = [outcome.sum().double() for outcome in outcomes]
        sums.append(cross_entropy(logits.double(), labels, reduction="sum"))
        self.values += torch.stack(sums).to(self.values.device)

    def metrics(self) -> Metrics:
        """The metrics of all samples counted."""
        true_positive, false_positive, false_negative, correct, samples, loss = self.values.tolist()
        positives = 2 * true_positive + false_positive + false_negative
        return Metrics(
            accuracy=correct / samples if samples else 0.0,
            f1=2 * true_positive / positives if positives else 0.0,
            loss=loss / samples if samples else 0.0,
            samples=int(samples),
        )
