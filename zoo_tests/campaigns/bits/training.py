"""One training run as bits: a hash of the weights, of every loss and of every gradient norm."""

from __future__ import annotations

import hashlib
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zoo_tests.harness.case import Case, share_of
from zoo_tests.harness.train_sharded import Boosted, boost
from zoo_tests.zoo.base import num_rows


@dataclass(frozen=True)
class Bits:
    """What one run left.

    Attributes:
        weights: hash of all weights after the last step.
        losses, norms: of every step, exactly.
        seconds: of a step, the median.
    """

    weights: str
    losses: tuple[str, ...]
    norms: tuple[str, ...]
    seconds: float

    def same(self, other: Bits, with_losses: bool = True) -> bool:
        """Whether both are the same bits; losses of parts of a batch are not those of the whole."""
        mine, theirs = (self.weights, self.norms), (other.weights, other.norms)
        return mine == theirs and (not with_losses or self.losses == other.losses)


def train_to_bits(case: Case, directory: Path, accumulation: int | None = None, resume: Case | None = None) -> Bits:
    """Train a case on these ranks.

    Args:
        accumulation: number of parts of the batch that are passed one after the other, each with a loss that
            `num_items_in_batch` divides; None for whole batches, whose labels are counted.
        resume: another case that a first half of the steps is trained with, and saved.
    """
    torch.manual_seed(5)
    losses, norms, seconds = [], [], []
    first = 0
    if resume is not None:
        first = case.recipe.steps // 2
        boosted = boost(resume)
        for step in range(first):
            _step(boosted, resume, step, accumulation, losses, norms)
        boosted.booster.save_checkpoint(directory / "checkpoint", **_state(boosted))
    boosted = boost(case)
    if resume is not None:
        boosted.booster.load_checkpoint(directory / "checkpoint", **_state(boosted))
    for step in range(first, case.recipe.steps):
        start = time.perf_counter()
        _step(boosted, case, step, accumulation, losses, norms)
        seconds.append(time.perf_counter() - start)
    boosted.booster.save_model(boosted.model, directory / "model")
    median = sorted(seconds)[len(seconds) // 2]
    return Bits(hash_of(directory / "model"), tuple(losses), tuple(norms), median)


def _state(boosted: Boosted) -> dict[str, Any]:
    return {"model": boosted.model, "optimizer": boosted.optimizer, "lr_scheduler": boosted.scheduler}


def _step(
    boosted: Boosted, case: Case, step: int, accumulation: int | None, losses: list[str], norms: list[str]
) -> None:
    batch = case.recipe.batch(step)
    backward = boosted.ordinary_backward if case.ordinary_loop else boosted.pipeline_backward
    if accumulation is not None:
        batch = {**batch, "num_items_in_batch": torch.tensor(num_rows(batch) * 7)}
    num_parts = accumulation or 1
    for part in range(num_parts):
        is_last = part == num_parts - 1
        with nullcontext() if is_last else boosted.booster.no_sync(boosted.model, boosted.optimizer):
            losses.append(backward(boosted.share(share_of(batch, part, num_parts))).item().hex())
    boosted.finish_step()
    norms.append(float(boosted.optimizer.grad_norm or 0.0).hex())


def hash_of(directory: Path) -> str:
    """Hash all weights of a saved model."""
    digest, tensors = hashlib.sha256(), {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
