"""Ranks of one machine that read each other's memory.

What breaks here first: memory that is reused while another rank still reads it, a rank that waits for one that died, or
files that stay open. Look in `local_peers.py` of
`plugins/hybrid_parallel/zero/collectives`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.setup.optimizer import exchange_of
from plugins.hybrid_parallel.zero.collectives.backend import ZeroCollectives
from plugins.hybrid_parallel.zero.collectives.p2p import P2PCollectives
from plugins.hybrid_parallel.zero.collectives.shared_memory import (
    Listener,
    PeerSegment,
    SharedMemoryCollectives,
    SharedSegment,
    SignalSocket,
    SignalSockets,
    connect,
)
from zoo_tests.harness.ranks import run_on_ranks, under_load

CPU = torch.device("cpu")


def test_memory_of_another_process_is_read_where_it_lies() -> None:
    memory = SharedSegment()
    numbers = memory.empty(5000, torch.float64).copy_(torch.arange(5000))
    other = PeerSegment(os.getpid(), memory.file, memory.token)
    window = other.map_view(memory.place(numbers) + 8 * 4000, 7, torch.float64)
    assert window.tolist() == list(range(4000, 4007))
    numbers[4001] = -1.0
    assert window[1] == -1.0
    # More than what was reserved at first.
    more = [memory.empty(40 * 2**20, torch.float32) for _ in range(3)]
    more[2][-1] = 3.0
    assert other.map_view(memory.place(more[2]) + 4 * (40 * 2**20 - 1), 1, torch.float32).item() == 3.0
    # Places and counts of more than 32 bits: pages that nobody writes take no memory.
    large, behind = memory.empty(2**32 + 9, torch.int8), memory.empty(3, torch.int64)
    large[-1], behind[2] = 7, 2**40
    assert other.map_view(memory.place(large) + 2**32 + 8, 1, torch.int8).item() == 7
    assert other.map_view(memory.place(behind), 3, torch.int64).tolist() == [0, 0, 2**40]


def test_memory_that_is_released_leaves_the_machine() -> None:
    memory = SharedSegment()
    numbers = memory.empty(2**20, torch.float32).fill_(1.0)
    held = os.fstat(memory.file).st_blocks * 512
    assert held >= 4 * 2**20
    memory.release(numbers)
    assert os.fstat(memory.file).st_blocks * 512 <= held - 4 * 2**20


def test_memory_is_gone_with_its_owner_and_not_taken_for_anothers() -> None:
    memory = SharedSegment()
    with pytest.raises(FileNotFoundError, match="has no memory to share"):
        PeerSegment(os.getpid(), memory.file, memory.token + 1)
    file, token = memory.file, memory.token
    del memory
    gc.collect()
    with pytest.raises(OSError):
        PeerSegment(os.getpid(), file, token)


def _ring(count: int, timeout_s: float = 5.0) -> list[SignalSockets]:
    """The lines of `count` ranks."""
    ends: list[dict[int, SignalSocket]] = [{} for _ in range(count)]
    for first in range(count):
        for second in range(first):
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends[first][second], ends[second][first] = SignalSocket(here, second), SignalSocket(there, first)
    return [SignalSockets(lines, timeout_s) for lines in ends]


def test_numbers_keep_their_order_within_a_tag() -> None:
    here, there = _ring(2)
    for number in range(4):
        here.send(1, number % 2, number)
    assert [there.receive(0, tag) for tag in (1, 0, 0, 1)] == [1, 0, 2, 3]


def test_other_users_do_not_connect() -> None:
    """As if this process were another user's, for the one that connects, then for the one that listens."""
    listener = Listener(token := secrets.randbits(62))
    stranger, own = os.geteuid() + 1, os.geteuid()
    with mock.patch("os.geteuid", return_value=stranger), pytest.raises(PermissionError, match="another user"):
        connect(token, 1)
    connect(token, 1)
    line = connect(token, 2)
    with mock.patch("os.geteuid", side_effect=[stranger, stranger, own]):  # the first had left before it said a word
        assert list(listener.accept(1, 5.0)) == [2]
    line.close()


_MANY = 20_000  # more than a socket holds


def test_sending_never_waits() -> None:
    here, there = _ring(2)
    for number in range(_MANY):
        here.send(1, 0, number)
        there.send(0, 0, -number)
    for number in range(_MANY):
        assert there.receive(0, 0) == number
        assert here.receive(1, 0) == -number


def test_what_an_ended_rank_has_said_is_heard() -> None:
    """It may end before it has read all that it was told, and while it is told more."""
    here, there = _ring(2)
    for number in range(3):
        there.send(0, 0, number)
        here.send(1, 0, number)
    del there
    gc.collect()
    here.send(1, 0, 3)
    assert [here.receive(1, 0) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConnectionError, match="connection closed by rank 1"):
        here.receive(1, 0)


_TWO_THAT_END = """
import os, socket
from plugins.hybrid_parallel.zero.collectives.shared_memory import SignalSocket, SignalSockets

ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
is_second = os.fork() == 0
ends[not is_second].close()
lines = SignalSockets({0: SignalSocket(ends[is_second], 0)}, 20.0)
for number in range(MANY):
    lines.send(0, 0, number)
if READS and not is_second:
    assert [lines.receive(0, 0) for _ in range(MANY)] == list(range(MANY))
"""


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True])
def test_a_script_is_over_when_all_is_said(reads: bool) -> None:
    """Where one reads, it gets everything of the other, whose script has ended; where none does, both end."""
    script = _TWO_THAT_END.replace("MANY", str(_MANY)).replace("READS", str(reads))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=under_load(60))
    assert (done.returncode, done.stderr) == (0, "")


def test_who_waits_in_vain_says_for_whom() -> None:
    here, there = _ring(2, timeout_s=0.1)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="timed out after 0.1 s of waiting for rank 1 in an exchange of ZeRO-1"):
        here.receive(1, 0)
    assert time.monotonic() - started < under_load(5)
    del there
    gc.collect()
    with pytest.raises(ConnectionError, match="connection closed by rank 1"):
        here.receive(1, 0)


def _kinds(make: Callable[[], Any]) -> list[type[ZeroCollectives]]:
    with make():
        return [type(exchange_of(dist.group.WORLD, device)) for device in (CPU, torch.device("cuda"))]


def _one_sees_no_neighbours() -> Any:
    """A rank in a container of its own, which the others cannot look into."""
    hidden = mock.patch(
        "plugins.hybrid_parallel.zero.collectives.shared_memory.PeerSegment", side_effect=PermissionError
    )
    return hidden if dist.get_rank() == 1 else contextlib.nullcontext()


def _another_system() -> Any:
    return mock.patch("plugins.hybrid_parallel.zero.collectives.shared_memory.SharedSegment", side_effect=OSError)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (contextlib.nullcontext, SharedMemoryCollectives),
        (_one_sees_no_neighbours, P2PCollectives),
        (_another_system, P2PCollectives),
    ],
)
def test_all_ranks_exchange_in_one_way(make: Callable[[], Any], kind: type[ZeroCollectives]) -> None:
    assert all(kinds == [kind, ZeroCollectives] for kinds in run_on_ranks(2, _kinds, make))


class _Slow(SharedMemoryCollectives):
    """One rank is always late: the others have long gone on when it reads their gradients and parameters."""

    def read(self, *args: Any, **kwargs: Any) -> Iterator[tuple[slice, Tensor]]:
        if dist.get_rank() == 1:
            time.sleep(0.003)
        return super().read(*args, **kwargs)


def _values(*how: Any) -> list[Tensor]:
    return [param.detach().clone() for param in _train(*how)]


def _train(exchange: type[ZeroCollectives] | None, accumulates: bool, overlap: bool) -> list[nn.Parameter]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), *(nn.Linear(16, 16) for _ in range(8)))
    made = contextlib.nullcontext()
    if exchange is not None:
        made = mock.patch("plugins.hybrid_parallel.setup.optimizer.SharedMemoryCollectives", exchange)
        if exchange is P2PCollectives:
            made = mock.patch("plugins.hybrid_parallel.setup.optimizer.meet_neighbours", lambda group: None)
    with made:
        plugin = HybridParallelPlugin(zero_bucket_size_in_mb=0.001, overlap_allgather=overlap)
        booster = Booster(plugin=plugin)
        model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        for last in (False, True) if accumulates else (True,):
            ids = torch.randint(11, (5,), generator=generator)
            with contextlib.nullcontext() if last else booster.no_sync(model, optimizer):
                booster.backward(model(ids).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # the parameters are the user's again
            for param in model.parameters():
                param.mul_(0.9)
    optimizer.wait_for_parameters()
    return list(model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_slow_reader_finds_what_was_written_for_it(accumulates: bool, overlap: bool) -> None:
    slow = run_on_ranks(2, _values, _Slow, accumulates, overlap)
    sent = run_on_ranks(2, _values, P2PCollectives, accumulates, overlap)
    for mine, theirs in zip([*slow[0], *slow[1]], [*sent[0], *sent[1]], strict=True):
        assert torch.equal(mine, theirs)


def _in_another_order(make: Callable[[], Any]) -> bool:
    """Shards that are started in one order are waited for in another, as where some parameters have no gradient."""
    with make():
        exchange = exchange_of(dist.group.WORLD, CPU)
    rank = dist.get_rank()
    flats = [exchange.empty(32, torch.float64, CPU).fill_(10.0**place + rank) for place in range(3)]
    pending = [exchange.reduce_scatter(flat, torch.empty(16, dtype=torch.float64)) for flat in flats]
    for place in (2, 0, 1) if rank else (1, 2, 0):
        assert torch.equal(pending[place].wait(), torch.full((16,), 2 * 10.0**place + 1, dtype=torch.float64))
        pending[place].mark_done(place != rank)
    return [each.wait_all_done() for each in pending] == [False, False, True]


@pytest.mark.parametrize("make", [contextlib.nullcontext, _another_system])
def test_shards_may_be_waited_for_in_any_order(make: Callable[[], Any]) -> None:
    assert all(run_on_ranks(2, _in_another_order, make))


def _left_behind(boosts: int) -> tuple[int, int]:
    files, references = [], []
    for _ in range(boosts):
        references += [weakref.ref(param) for param in _train(None, False, False)]
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    return files[-1] - files[0], sum(reference() is not None for reference in references)


@pytest.mark.slow
def test_models_leave_neither_files_nor_parameters() -> None:
    assert run_on_ranks(2, _left_behind, 4) == [(0, 0), (0, 0)]
