"""The smallest model that has everything: odd sizes, parameters with and without bias, one that is never used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

EXACT = {"rtol": 1e-10, "atol": 1e-13}
ROWS = 7  # of a global batch: uneven shares

Batch = dict[str, Tensor]


class Toy(nn.Module):
    """[rows, 5] -> [rows, 3]; `spare` takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 11), nn.Linear(11, 3, bias=False)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def toy(dtype: torch.dtype = torch.float64) -> Toy:
    """Always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Toy().to(dtype)


def global_batch(step: int, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> Batch:
    """Other numbers at every step and in every row."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)
    return {"x": x.to(dtype), "y": y.to(dtype)}


def share_of(batch: Batch) -> Batch:
    """This rank's share where all ranks are data-parallel."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        key: value[len(value) * rank // world_size : len(value) * (rank + 1) // world_size]
        for key, value in batch.items()
    }


def mean_square(outputs: Tensor, batch: Batch) -> Tensor:
    """The mean over the samples."""
    return (outputs - batch["y"]).square().sum(-1).mean()


@dataclass
class Pair:
    """A boosted toy and a plain one that are trained alike.

    Attributes:
        before_boost: called with (model, optimizer) of both, before the one is boosted.
    """

    booster: Booster
    model: Any
    optimizer: Any
    plain: nn.Module
    plain_optimizer: torch.optim.Optimizer

    @staticmethod
    def make(
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        before_boost: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
        **options: Any,
    ) -> Pair:
        models = [toy(), toy()]
        optimizers = [make_optimizer(model) for model in models]
        if before_boost is not None:
            for model, optimizer in zip(models, optimizers, strict=True):
                before_boost(model, optimizer)
        booster = Booster(plugin=HybridParallelPlugin(**{"zero_bucket_size_in_mb": 1e-4, **options}))
        model, optimizer, _ = booster.boost(models[0], optimizers[0], mean_square)
        return Pair(booster, model, optimizer, models[1], optimizers[1])

    def backward(self, step: int) -> None:
        """Gradients of one global batch on both sides; losses are compared."""
        torch.testing.assert_close(self.sharded_backward(step), self.plain_backward(step), **EXACT)

    def sharded_backward(self, step: int, rows: int = ROWS, ordinary: bool = False) -> Tensor:
        """Gradients of one global batch, by `execute_pipeline` or an ordinary loop (of equal shares); the loss."""
        share = share_of(global_batch(step, rows))
        if not ordinary:
            return self.booster.execute_pipeline(iter([share]), self.model, optimizer=self.optimizer).loss
        loss = mean_square(self.model(x=share["x"]), share)
        self.booster.backward(loss, self.optimizer)
        return loss.detach()

    def plain_backward(self, step: int, rows: int = ROWS) -> Tensor:
        """The same of the plain model."""
        batch = global_batch(step, rows)
        loss = mean_square(self.plain(batch["x"]), batch)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def check_parameters(self, **tolerance: float) -> None:
        expected = dict(self.plain.named_parameters())
        for name, param in self.model.unwrap().named_parameters():
            torch.testing.assert_close(
                param, expected[name], **(tolerance or EXACT), msg=lambda text, name=name: f"{name}: {text}"
            )

    def check_gradients(self) -> None:
        expected = {name: param.grad for name, param in self.plain.named_parameters() if param.grad is not None}
        found = self.optimizer.full_gradients()
        assert set(found) == set(expected)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], **EXACT)
