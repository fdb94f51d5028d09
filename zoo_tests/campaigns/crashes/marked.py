"""A training state that tells where it comes from: every number of it is the step at which it was saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.toy import global_batch, mean_square, share_of, toy


class MarkedTraining:
    """A toy and its AdamW states on all ranks; a mixture of two states cannot go unnoticed."""

    def __init__(self) -> None:
        model = toy()
        self.booster = Booster(plugin=HybridParallelPlugin(zero_bucket_size_in_mb=1e-4))
        self.model, self.optimizer = self.booster.boost(model, torch.optim.AdamW(model.parameters()))
        batches = iter([share_of(global_batch(0))])
        self.booster.execute_pipeline(batches, self.model, mean_square, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def objects(self) -> dict[str, Any]:
        """What a checkpoint is made of."""
        return {"model": self.model, "optimizer": self.optimizer}

    def mark(self, step: int) -> None:
        """Let every number be `step`."""
        for tensor in self._tensors():
            tensor.fill_(step)

    def marks(self) -> list[float]:
        """All numbers that there are."""
        return sorted({value for tensor in self._tensors() for value in tensor.flatten().tolist()})

    def save(self, path: Path, step: int, **options: Any) -> Any:
        """Save the state of a step."""
        self.mark(step)
        return self.booster.save_checkpoint(path, **self.objects, step=step, **options)

    def load(self, path: Path, **options: Any) -> int:
        """Load, and see that the state is that of one step, which is returned."""
        self.mark(-1)
        step = self.booster.load_checkpoint(path, **self.objects, **options)["step"]
        assert self.marks() == [step], f"{path} gave {self.marks()} for step {step}"
        return step

    def _tensors(self) -> Iterator[Tensor]:
        for param in self.model.unwrap().parameters():
            yield param.detach()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
