"""Reductions inside a machine and then across: four ranks that take themselves for two machines of two.

Training on separate machines is in `zoo_tests/cluster/test_parity.py`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.setup.optimizer import exchange_of, ranks_per_machine
from plugins.hybrid_parallel.zero.collectives.p2p import HierarchicalCollectives
from zoo_tests.harness.ranks import run_on_ranks

CPU = torch.device("cpu")
_SHARD = 7


def _in_any_order() -> tuple[list[bool], int]:
    """Several exchanges at once; whether sums were finite, and the bytes of numbers sent to the other machine."""
    rank, group = dist.get_rank(), dist.group.WORLD
    with (
        mock.patch("plugins.hybrid_parallel.setup.optimizer.meet_neighbours", lambda group: None),
        mock.patch("booster.failure.peers.machine", lambda: f"machine{rank // 2}"),
    ):
        exchange = exchange_of(group, CPU)
    assert isinstance(exchange, HierarchicalCollectives)
    crossing, send = [0], dist.isend

    def sent(tensor: Tensor, *args: Any, group_dst: int, **kwargs: Any) -> Any:
        if group_dst // 2 != rank // 2 and tensor.is_floating_point():
            crossing[0] += tensor.numel() * tensor.element_size()
        return send(tensor, *args, group_dst=group_dst, **kwargs)

    with mock.patch.object(dist, "isend", sent):
        flats = [_values(rank, place) for place in range(3)]
        pending = [exchange.reduce_scatter(flat, flat.new_empty(_SHARD)) for flat in flats]
        for place in ((1, 2, 0), (2, 0, 1), (0, 1, 2), (2, 1, 0))[rank]:
            whole = sum(_values(other, place) for other in range(4))
            torch.testing.assert_close(pending[place].wait(), whole.view(4, -1)[rank], rtol=1e-12, atol=0)
            pending[place].mark_done(place != rank)
        finite = [each.wait_all_done() for each in pending]
        gathered = [torch.full((4 * _SHARD,), -1.0, dtype=torch.float64) for _ in range(2)]
        for place, flat in enumerate(gathered):
            flat.view(4, -1)[rank] = _values(rank, place)[:_SHARD]
        handles = [exchange.all_gather(flat) for flat in gathered]
        for place in (0, 1) if rank % 2 else (1, 0):
            handles[place].wait()
            assert torch.equal(gathered[place], torch.cat([_values(each, place)[:_SHARD] for each in range(4)]))
            handles[place].close()
    return finite, crossing[0]


def _values(rank: int, place: int) -> Tensor:
    return torch.randn(4 * _SHARD, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + place))


def test_two_machines_in_any_order() -> None:
    shard = _SHARD * 8
    for finite, crossing in run_on_ranks(4, _in_any_order):
        assert finite == [False, False, False], "ranks 0 to 2 have each said so of one"
        assert crossing == 3 * shard + 2 * shard, "one shard of each exchange, where every rank for itself sends two"


@pytest.mark.parametrize(
    ("machines", "found"),
    [("aabb", 2), ("aaabbb", 3), ("aabbcc", 2), ("abab", 1), ("aab", 1), ("aabbb", 1), ("abcd", 1), ("aaaa", 1),
     ("aabbaa", 1)],
)  # fmt: skip
def test_machines_with_as_many_neighbours_each(machines: str, found: int) -> None:
    assert ranks_per_machine(machines) == found
