"""Ranks that boost a loader: they agree on its data and order, or all of them are told why they cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed

_DATA = TensorDataset(torch.arange(12))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([sample[0] for sample in samples]).float()}


def _everyones(batches: Any) -> list[int]:
    """The samples of all ranks."""
    own = torch.cat([batch["x"] for batch in batches])
    shares = [torch.zeros(6) for _ in range(2)]
    dist.all_gather(shares, own)
    return torch.cat(shares).int().tolist()


def _refused(boost: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        boost()


@distributed(2)
def test_replicas_share_one_order_of_one_dataset() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # as scripts for DistributedDataParallel do
    booster = Booster(HybridParallelPlugin())
    plain = DataLoader(_DATA, batch_size=2, shuffle=True, collate_fn=_collate)
    once = booster.boost(plain)
    assert sorted(_everyones(once)) == list(range(12))
    assert booster.boost(once) is once, "a loader that is boosted already is not shared out again"

    _refused(lambda: booster.boost(DataLoader(Subset(_DATA, range(rank, 12, 2)))), "other samples on rank 1 than")
    split = random_split(_DATA, [8, 4], torch.Generator().manual_seed(rank))[0]
    _refused(lambda: booster.boost(DataLoader(split)), r"the subset \(random_split\?\) has other samples on rank 1")
    own = TensorDataset(torch.arange(12) * (rank + 1))
    _refused(
        lambda: booster.boost(DataLoader(own)), "the dataset has other samples on rank 1 than on rank 0; all ranks"
    )
    shuffled = DataLoader(_DATA, shuffle=True, generator=torch.Generator().manual_seed(rank))
    _refused(lambda: booster.boost(shuffled), "the generator of the dataloader is in another state on rank 1")


def _step(booster: Booster, batch: Any, model: Any, optimizer: Any, ordinary: bool) -> None:
    if ordinary:
        booster.backward(model(**batch).mean(), optimizer)
    else:
        booster.execute_pipeline(batch, model, lambda outputs, _: outputs.mean(), optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()


@distributed(2)
def test_first_batches_are_compared_over_replicas() -> None:
    for ordinary in (False, True):
        booster = Booster(HybridParallelPlugin())
        model = _Model()
        objects = (model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = DataLoader(_DATA, batch_size=2, collate_fn=_collate)
        model, optimizer = booster.boost(*objects)
        seen: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = seen.append
        logger = logging.getLogger("plugins.hybrid_parallel.data.checks")
        logger.addHandler(handler)
        for batch in loader:
            _step(booster, batch, model, optimizer, ordinary)
        logger.removeHandler(handler)
        assert len(seen) == (dist.get_rank() == 0), "it is said once"
        assert all("all 2 data-parallel replicas got the same batch" in record.getMessage() for record in seen)

        booster = Booster(HybridParallelPlugin())
        model = _Model()
        model, optimizer, shared = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        if dist.get_rank() == 0:
            next(iter(shared))
        with pytest.raises(ConfigurationError, match=r"rank 1 .* has iterated .* 1 times, rank 0 .* 2"):
            _step(booster, next(iter(shared)), model, optimizer, ordinary)


@distributed(1)
def test_a_batch_or_an_iterator_is_asked_for() -> None:
    booster = Booster(HybridParallelPlugin())
    model = booster.boost(_Model())
    loader = DataLoader(_DATA, batch_size=2, collate_fn=_collate)
    found = booster.execute_pipeline({"x": torch.ones(3)}, model, lambda outputs, _: outputs.mean())
    assert found.loss.item() == 1
    for other in (loader, [{"x": torch.ones(3)}]):
        with pytest.raises(ConfigurationError, match=r"takes a batch from an iterator, and was given a .* iter\(data"):
            booster.execute_pipeline(other, model)
