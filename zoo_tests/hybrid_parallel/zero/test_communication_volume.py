"""What ZeRO-1 sends in a step, and that its result does not depend on how parameters lie in buckets.

What breaks here first: a buffer that is sent twice, or sums in the order of who owns a shard. Look in
`plugins/hybrid_parallel/zero/collectives/p2p.py` and `bucket.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.zero.bucket_layout import GradBufferPool
from plugins.hybrid_parallel.zero.collectives.backend import ZeroCollectives
from plugins.hybrid_parallel.zero.collectives.shared_memory import PeerSegment
from zoo_tests.harness.ranks import run_on_ranks

_SIZES = (37, 53, 29, 5)
_STEPS = 2


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(_SIZES, _SIZES[1:], strict=False)]
    return nn.Sequential(*layers)


def _train(bucket_size: float, **options: Any) -> tuple[nn.Module, Any]:
    model = _model()
    plugin = HybridParallelPlugin(zero_bucket_size_in_mb=bucket_size, **options)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        booster.backward(model(torch.randn(7, _SIZES[0], generator=generator)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _apart() -> Any:
    """As if every rank were on a machine of its own."""
    return mock.patch("plugins.hybrid_parallel.setup.optimizer.meet_neighbours", lambda group: None)


def _together() -> Any:
    return contextlib.nullcontext()


def _bytes_of_a_step(bucket_size: float, place: Callable[[], Any]) -> tuple[int, int, int]:
    """Bytes that this rank got from others, in shards and in words, and those of a reduce-scatter and an all-gather."""
    got: list[int] = []
    receive, window = dist.irecv, PeerSegment.map_view

    def received(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        got.append(tensor.numel() * tensor.element_size())
        return receive(tensor, *args, **kwargs)

    def read(self: PeerSegment, place: int, count: int, dtype: torch.dtype, is_kept: bool = False) -> Tensor:
        got.append(count * dtype.itemsize)
        return window(self, place, count, dtype, is_kept)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a buffer goes through one exchange, not through gloo's own collectives")

    with (
        place(),
        mock.patch.object(dist, "irecv", received),
        mock.patch.object(PeerSegment, "map_view", read),
        mock.patch("plugins.hybrid_parallel.zero.collectives.backend.reduce_scatter_flat", refused),
        mock.patch("plugins.hybrid_parallel.zero.collectives.backend.all_gather_flat", refused),
    ):
        _, optimizer = _train(bucket_size)
    padded = sum(bucket.flat.numel() for bucket in optimizer.buckets)
    ranks = dist.get_world_size()
    assert sum(bucket.shard_size for bucket in optimizer.buckets) * ranks == padded
    words = sum(size for size in got if size == 8)
    return sum(got) - words, words, _STEPS * 2 * padded * 4 * (ranks - 1) // ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bucket_size", [0.002, 1.0])
@pytest.mark.parametrize("place", [_together, _apart])
def test_a_step_is_one_reduce_scatter_and_one_all_gather(
    ranks: int, bucket_size: float, place: Callable[[], Any]
) -> None:
    for got, words, expected in run_on_ranks(ranks, _bytes_of_a_step, bucket_size, place):
        assert got == expected
        # Whether a shard is finite (and, on one machine, the first word of each memory): 8 bytes a bucket and rank.
        assert words <= 0.2 * expected


def _parameters(bucket_size: float, place: Callable[[], Any]) -> tuple[int, list[list[float]]]:
    with place():
        model, optimizer = _train(bucket_size)
    return len(optimizer.buckets), [param.flatten().tolist() for param in model.parameters()]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_neither_the_size_of_buckets_nor_the_way_of_shards_changes_a_bit(ranks: int) -> None:
    counts, results = set(), []
    for bucket_size in (1e-5, 0.0005, 0.006, 0.0075, 1.0):
        for place in (_together, _apart):
            count, values = run_on_ranks(ranks, _parameters, bucket_size, place)[0]
            counts.add(count)
            results.append(values)
    assert len(counts) >= 4, "these sizes are to make different buckets"
    assert all(values == results[0] for values in results)


def _own_gradients_are_gone() -> bool:
    _, optimizer = _train(0.002)
    return all(bucket.flat_grads is None for bucket in optimizer.buckets)


def test_local_gradients_are_given_up_when_they_are_reduced() -> None:
    assert all(run_on_ranks(2, _own_gradients_are_gone))


def test_memory_of_reduced_gradients_is_taken_again() -> None:
    memory, cpu = GradBufferPool(ZeroCollectives(None), unit=400), torch.device("cpu")
    first = memory.take(70, torch.float32, cpu)
    memory.give(first)
    second = memory.take(100, torch.float32, cpu)
    assert second.data_ptr() == first.data_ptr() and second.shape == (100,)
    assert memory.take(100, torch.float32, cpu).data_ptr() != second.data_ptr(), "what is in use is not given twice"
    memory.give(second)
    assert memory.take(100, torch.float64, cpu).dtype == torch.float64
