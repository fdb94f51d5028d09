"""Accuracy, F1 and loss from counts, which can be summed exactly over ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Metrics:
    """Metrics of one evaluation: `loss` is the mean over `samples`; `f1` is the F1 score of label 1."""

    accuracy: float
    f1: float
    loss: float
    samples: int

    def as_dict(self) -> dict[str, float | int]:
        """Return the metrics as a dict, for JSON."""
        return asdict(self)


class Counts:
    """Counts of an evaluation so far.

    `values` [6]: true positives, false positives, false negatives, correct predictions, samples, sum of losses.

    Args:
        device: device of the counts; the device of the logits saves one copy per batch.
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
        losses = cross_entropy(logits.double(), labels, reduction="none")
        # Multiples of 2^-32: their sum in fp64 is exact, whichever ranks and batches the samples are in.
        sums.append((losses * 2.0**32).round().sum() / 2.0**32)
        self.values += torch.stack(sums).to(self.values.device)

    def metrics(self) -> Metrics:
        """Return the metrics over all counted samples."""
        true_positive, false_positive, false_negative, correct, samples, loss = self.values.tolist()
        positives = 2 * true_positive + false_positive + false_negative
        return Metrics(
            accuracy=correct / samples if samples else 0.0,
            f1=2 * true_positive / positives if positives else 0.0,
            loss=loss / samples if samples else 0.0,
            samples=int(samples),
        )
