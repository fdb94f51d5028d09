"""Ranks that this process starts: processes on this machine, or threads whose collectives need no network or launch.

Every wait for a process has a limit, and none outlives its parent. Of threads one runs at a time, and gives way where
it waits for others: objects that ranks would have of their own, such as torch's random numbers, are exchanged there,
and nothing needs a lock. A rank that fails ends the others. The arithmetic is that of torch's own threaded group
(`multi_threaded_pg`), which lacks messages between two ranks, collectives that are started and waited for later, and a
world besides the process's own.
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg as torchs

from booster.errors import ConfigurationError
from booster.network import hold_store
from shardformer.distributed.process_groups import ProcessGroups

# Imported once for all ranks: the imports take longer than the work.
PRELOAD = (
    "hybrid_booster",  # first: it finds the other packages even next to folders with their names
    "torch.distributed.device_mesh",
    "transformers.modeling_utils",
    "transformers.loss.loss_utils",
    "plugins.hybrid_parallel",
    "shardformer.policies.registry",
)
_GRACE_S = 1.0  # time for the other ranks to answer after one has failed
_HOST = "127.0.0.1"


class RankFailure(RuntimeError):
    """A rank failed or did not answer in time; the message names the rank and the reason."""


@dataclass(frozen=True)
class RankResult:
    """Result of a function on one rank."""

    value: Any = None  # what the function returned
    error: str | None = None  # type, text and place of the error that it raised, in one line; None if it returned
    traceback: str = ""  # the error as Python prints it
    is_mistake: bool = False  # whether the error is a `ConfigurationError`, of which `error` is the text alone

    @staticmethod
    def of_error(error: BaseException) -> RankResult:
        """Describe an error that was caught on this rank."""
        trace = error.__traceback__ and error.__traceback__.tb_next  # the first entry is a function of this file
        lines = "".join(traceback.format_exception(type(error), error, trace))
        if isinstance(error, ConfigurationError):
            return RankResult(error=str(error), traceback=lines, is_mistake=True)
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}, line {last.lineno}"
        text = f"{type(error).__name__}: {' '.join(str(error).split())} ({where})"
        return RankResult(error=text, traceback=lines)


class LocalRanks:
    """New ranks on this machine with a process group of their own, until `stop` or the end of the context.

    Args:
        timeout_s: time limit of the rendezvous and of each collective, in seconds.
        device: "cpu" for gloo, "cuda" for NCCL with a GPU for each rank.
        preload: modules to import once for all ranks; counts for the first ranks that this process starts.
    """

    def __init__(
        self, world_size: int, *, timeout_s: float, device: str = "cpu", preload: Sequence[str] = PRELOAD
    ) -> None:
        context = fork_server(preload)
        # Not a file: ranks that wait for one poll it, and take the cores from the others.
        self._store = hold_store(_HOST)
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        self._num_due = [1] * world_size  # results that each rank still owes; the first is that of `_join`
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe()
                place = (rank, world_size, self._store.port, timeout_s, device)
                process = context.Process(target=_serve, args=(theirs, place), daemon=True)
                with _without_main():
                    process.start()
                theirs.close()
                self.processes.append(process)
                self._connections.append(mine)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let every rank run a module-level function next; stops all if it or its arguments do not pickle."""
        try:
            with _without_main():
                for rank, connection in enumerate(self._connections):
                    with suppress(ConnectionError):  # `collect` reports a rank that has died
                        connection.send((function, arguments))
                    self._num_due[rank] += 1
        except Exception as error:  # objects that cannot be pickled raise errors of many types
            self.stop()
            raise ConfigurationError(
                f"the arguments cannot be sent to other processes ({error}); define the model's class in a "
                "module of its own"
            ) from None

    def collect(self, timeout_s: float | Callable[[], float]) -> dict[int, RankResult]:
        """Wait for the results of the last submitted function; the first error shortens the wait.

        An error of an earlier function, or the end of a rank's process, counts as the rank's result.

        Args:
            timeout_s: time limit in seconds; a function is asked again when it has passed; the largest counts.

        Returns:
            Rank -> result, in the order in which they came; ranks that did not answer in time are left out.
        """
        start, limit_s, grace = time.monotonic(), 0.0, math.inf
        results: dict[int, RankResult] = {}
        waiting = dict(enumerate(zip(self._connections, self.processes, strict=True)))
        while waiting:
            limit_s = max(limit_s, timeout_s() if callable(timeout_s) else timeout_s)
            if (left := min(start + limit_s, grace) - time.monotonic()) <= 0:
                break
            # A dead rank's connection stays open while a process that it has forked is alive.
            ready = wait(
                [each for connection, process in waiting.values() for each in (connection, process.sentinel)], left
            )
            for rank, (connection, process) in list(waiting.items()):
                if connection not in ready and process.sentinel not in ready:
                    continue
                result = self._receive(rank)
                if self._num_due[rank] and result.error is None:
                    continue  # of an earlier function
                results[rank] = result
                del waiting[rank]
                if result.error is not None:
                    grace = min(grace, time.monotonic() + _GRACE_S)
        return results

    def stop(self) -> None:
        """Kill all ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def _receive(self, rank: int) -> RankResult:
        connection, process = self._connections[rank], self.processes[rank]
        self._num_due[rank] -= 1
        try:
            if connection.poll():
                return connection.recv()
        except (EOFError, ConnectionError):
            process.join(_GRACE_S)
        return RankResult(error=f"its process was ended, exit code {process.exitcode}")


def run_on_local_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float, device: str = "cpu"
) -> list[Any]:
    """Run a module-level function on new ranks with a process group of their own.

    Args:
        timeout_s: seconds for everything, including the start.
        device: "cpu" for gloo, "cuda" for NCCL with a GPU for each rank.

    Returns:
        The function's results, in rank order.

    Raises:
        RankFailure: if a rank failed otherwise, or did not end in time.
    """
    start = time.monotonic()
    with LocalRanks(world_size, timeout_s=timeout_s, device=device) as ranks:
        ranks.submit(_without_warnings, function, arguments)
        results = ranks.collect(timeout_s - (time.monotonic() - start))
    failures = {rank: result for rank, result in results.items() if result.error is not None}
    for result in failures.values():
        if result.is_mistake:
            raise ConfigurationError(result.error)
    for rank, result in failures.items():
        failure = RankFailure(f"rank {rank}: {result.error}")
        failure.add_note(result.traceback)
        raise failure
    if len(results) < world_size:
        late = ", ".join(str(rank) for rank in range(world_size) if rank not in results)
        raise RankFailure(f"ranks {late} of {world_size} did not answer within {timeout_s:g} s")
    return [results[rank].value for rank in range(world_size)]


def devices_for(world_size: int) -> str:
    """Return "cuda" if there is a GPU for each of `world_size` ranks, otherwise "cpu"."""
    import torch

    return "cuda" if torch.cuda.device_count() >= world_size else "cpu"


def fork_server(preload: Sequence[str]) -> Any:
    """Return a `multiprocessing` context with these modules imported, whose server ignores Ctrl-C."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: a new process would run the training script, which seldom guards against that."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ----- what runs in a rank -----


def _serve(connection: Connection, place: tuple[int, int, int, float, str]) -> None:
    """Join the process group, and run functions until killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=_end_with_parent, name="booster-parent", daemon=True).start()
    with suppress(ConnectionError):  # the parent has ended
        _answer(connection, _join, place)
        while connection.poll(None):
            _answer(connection, _run_next, (connection,))
    os._exit(1)


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = RankResult(function(*arguments))
    except BaseException as error:
        result = RankResult.of_error(error)
        sys.stdout.flush()  # the process will be killed
    try:
        connection.send(result)
    except ConnectionError:
        raise
    except Exception as error:  # what it returned cannot be pickled
        connection.send(RankResult.of_error(error))


def _run_next(connection: Connection) -> Any:
    function, arguments = connection.recv()
    return function(*arguments)


def _without_warnings(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a function without the warnings that every rank would repeat."""
    logging.disable(logging.WARNING)
    return function(*arguments)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _join(rank: int, world_size: int, port: int, timeout_s: float, device: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.TCPStore(_HOST, port, is_master=False, timeout=timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


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
        self.turn = threading.RLock()
        self.num_running = world_size  # ranks that have not ended
        # By thread: what it waits for, and what wakes it alone; all of 16 would wake for each message.
        self._waits: dict[int, tuple[Callable[[], bool], threading.Condition]] = {}
        self.meetings: dict[tuple, _Meeting] = {}
        self.messages: dict[tuple, dict[int, Tensor]] = defaultdict(dict)
        self.errors: list[BaseException] = []

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Let other ranks run until `is_done`."""
        if is_done() and not self.errors:
            return
        state, own, condition = torch.get_rng_state(), threading.get_ident(), threading.Condition(self.turn)
        self._waits[own] = is_done, condition
        self.end_deadlock()
        condition.wait_for(lambda: self.errors or is_done())
        del self._waits[own]
        if self.errors:
            raise _EndOfRank
        torch.set_rng_state(state)

    def wake(self) -> None:
        """Let those ranks go on that have what they wait for; all after an error."""
        for is_done, condition in self._waits.values():
            if self.errors or is_done():
                condition.notify()

    def end_deadlock(self) -> None:
        """End all ranks if each waits for another."""
        if self._waits and len(self._waits) == self.num_running and not any(done() for done, _ in self._waits.values()):
            self.errors.append(RuntimeError("all ranks wait for messages or collectives that no other takes part in"))
            self.wake()


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
            self._place.wake()
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
        self._place.wake()
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
                place.wake()

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
