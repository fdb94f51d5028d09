"""Ranks that are threads of this process: process groups whose collectives move values, without network or launch.

One rank runs at a time, and gives way where it waits for others: objects that ranks would have of their own, such as
torch's random numbers, are exchanged there, and nothing needs a lock. A rank that fails ends the others, so nothing
hangs. The collectives' arithmetic is that of torch's own threaded group (`multi_threaded_pg`), which lacks messages
between two ranks, collectives that are started and waited for later, and a world besides the process's own.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg as torchs

from shardformer.distributed.process_groups import ProcessGroups

_BACKEND = "thread_ranks"


class _EndOfRank(BaseException):
    """Ends a rank after another one has failed."""


class _Meeting:
    """One collective: what each rank gave, and whether all have come."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.num_missing = size


class _Place:
    """What the ranks of one run share. A rank runs while it holds `turn`."""

    def __init__(self, world_size: int) -> None:
        self.turn = threading.Condition()
        self.num_running = world_size  # ranks that have not ended
        self._waits: dict[int, Callable[[], bool]] = {}  # by thread
        self.meetings: dict[tuple, _Meeting] = {}
        self.messages: dict[tuple, dict[int, Tensor]] = defaultdict(dict)
        self.errors: list[BaseException] = []

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Let other ranks run until `is_done`."""
        if is_done() and not self.errors:
            return
        state, own = torch.get_rng_state(), threading.get_ident()
        self._waits[own] = is_done
        self.end_deadlock()
        self.turn.wait_for(lambda: self.errors or is_done())
        del self._waits[own]
        if self.errors:
            raise _EndOfRank
        torch.set_rng_state(state)

    def end_deadlock(self) -> None:
        """End all ranks if each waits for another."""
        if self._waits and len(self._waits) == self.num_running and not any(done() for done in self._waits.values()):
            self.errors.append(RuntimeError("all ranks wait for messages or collectives that no other takes part in"))
            self.turn.notify_all()


class _Work:
    """Handle of a collective or a message, as torch's `Work`."""

    def __init__(self, place: _Place, is_done: Callable[[], bool], finish: Callable[[], None] = lambda: None) -> None:
        self._place, self.is_completed, self._finish = place, is_done, finish

    def wait(self, timeout: Any = None) -> bool:
        self._place.wait(self.is_completed)
        finish, self._finish = self._finish, lambda: None
        finish()
        return True


_of_thread = threading.local()  # place


class _ThreadGroup(dist.ProcessGroup):
    """Process group of one rank."""

    supports_coalescing, options = False, None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._count = _of_thread.place, 0
        self._own, self._size = rank, size
        self._sent: dict[tuple, int] = defaultdict(int)
        self._expected: dict[tuple, int] = defaultdict(int)

    # What torch's functions ask of a group. A class in Python is its own backend.
    # Before it has a name, torch 2.15 would hang a recorder of collectives on one with devices.
    _device_types = property(lambda self: [torch.device("cpu")] if self in c10d._world.pg_names else [])
    group_name = pg_name = name = property(lambda self: c10d._world.pg_names[self])

    def _get_backend(self, device: torch.device) -> _ThreadGroup:
        return self

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return _BACKEND

    def _meet(self, collective: Any, given: Any) -> _Work:
        self._count += 1
        key, meetings = (self.name, self._count), self._place.meetings
        meeting = meetings.setdefault(key, _Meeting(self._size))
        meeting.given[self._own] = given
        meeting.num_missing -= 1
        if not meeting.num_missing:
            collective.work(meetings.pop(key).given)
            meeting.given.clear()
            self._place.turn.notify_all()
        return _Work(self._place, lambda: not meeting.num_missing)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._meet(torchs.AllReduce(opts.reduceOp), tensors)

    def barrier(self, opts: Any = None) -> _Work:
        return self.allreduce([torch.ones(1)], dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._meet(torchs.Broadcast(opts.rootRank), tensors)

    def allgather(self, out: list[list[Tensor]], x: list[Tensor], opts: Any = None) -> _Work:
        return self._meet(torchs.AllGather(), (out, x))

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> _Work:
        return self.allgather([list(out.chunk(self._size))], [x])

    def reduce_scatter(self, out: list[Tensor], x: list[list[Tensor]], opts: Any) -> _Work:
        return self._meet(torchs.ReduceScatter(opts.reduceOp), (out, x))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> _Work:
        return self.reduce_scatter([out], [list(x.chunk(self._size))], opts)

    def all_to_all_single(self, out: Tensor, x: Tensor, received: Any, sent: Any, opts: Any = None) -> _Work:
        return self._meet(torchs.AllToAllBase(), (out, x, received, sent))

    def alltoall(self, out: list[Tensor], x: list[Tensor], opts: Any = None) -> _Work:
        return self._meet(torchs.AllToAll(), (out, x))

    def gather(self, out: Any, x: list[Tensor], opts: Any) -> _Work:
        return self._meet(torchs.Gather(opts.rootRank), (out, x))

    def scatter(self, out: list[Tensor], x: Any, opts: Any) -> _Work:
        return self._meet(torchs.Scatter(opts.rootRank), (out, x))

    # Before torch 2.13
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Work:
        number, self._sent[to, tag] = self._sent[to, tag], self._sent[to, tag] + 1
        self._place.messages[self.name, self._own, to, tag][number] = tensors[0].detach().clone()
        self._place.turn.notify_all()
        return _Work(self._place, lambda: True)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        number, self._expected[source, tag] = self._expected[source, tag], self._expected[source, tag] + 1
        arrived = self._place.messages[self.name, source, self._own, tag]
        copy = tensors[0].detach().copy_
        return _Work(self._place, lambda: number in arrived, lambda: copy(arrived.pop(number)))


def _get_without_lock(self: functools.cached_property, instance: Any, owner: type | None = None) -> Any:
    """Get a cached property as Python 3.12 does: the lock of Python 3.11, held in a collective, stops other ranks."""
    if instance is None:
        return self
    if self.attrname not in vars(instance):
        vars(instance)[self.attrname] = self.func(instance)
    return vars(instance)[self.attrname]


@contextmanager
def _worlds_of_threads() -> Iterator[list[threading.Thread]]:
    """Let torch's functions see the world of the thread that calls them; other threads keep the process's own.

    Yields:
        A list for the threads. If one does not end, it keeps its world, and so never meets that of the process.
    """

    class Worlds(torchs.ThreadLocalWorld):
        @property
        def comms(self) -> list:  # missing in torch 2.11
            world = self._get_world()
            return own.comms if world is own else vars(world).setdefault("comms", [])

        def _get_world(self) -> Any:
            return super()._get_world() if hasattr(_of_thread, "place") else own

    dist.Backend.register_backend(_BACKEND, lambda _, rank, size, __: _ThreadGroup(rank, size), devices=["cpu"])
    own, hook, state, threads = c10d._world, sys.excepthook, torch.get_rng_state(), []
    c10d._world = Worlds()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with mock.patch.object(functools.cached_property, "__get__", _get_without_lock):
            yield threads
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook  # init_process_group wraps it each time, to add the rank
        if not any(thread.is_alive() for thread in threads):
            c10d._world = own
        torch.set_rng_state(state)


def run_on_threads(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run a function on `world_size` ranks that are threads of this process, with a CPU process group of their own.

    The process may be a rank of a job, whose groups are not touched.

    Returns:
        The results, by rank.

    Raises:
        Exception: the first error of a rank, as it was raised there; the other ranks have ended.
        TimeoutError: a rank computes for too long.
    """
    place, store, results = _Place(world_size), dist.HashStore(), [None] * world_size

    def run(rank: int) -> None:
        _of_thread.place = place
        with place.turn:
            try:
                torch.set_rng_state(state)
                dist.init_process_group(_BACKEND, rank=rank, world_size=world_size, store=store)
                try:
                    results[rank] = function(*arguments)
                finally:
                    ProcessGroups.forget()
                    dist.destroy_process_group()
            except _EndOfRank:
                pass
            except BaseException as error:
                place.errors.append(error)
            finally:
                place.num_running -= 1
                place.end_deadlock()
                place.turn.notify_all()

    with _worlds_of_threads() as threads, torch.autograd.set_multithreading_enabled(False):
        state = torch.get_rng_state()
        threads += [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            place.errors.append(TimeoutError(f"a rank has not ended within {timeout_s:.0f} s"))
            for thread in threads:  # they end where they next wait for each other
                thread.join(timeout_s / 10)
    if place.errors:
        raise place.errors[0]
    return results
