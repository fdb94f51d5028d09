"""Start ranks on this machine: every wait for them has a limit, and none outlives its parent."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from booster.errors import ConfigurationError
from booster.network import hold_store

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
        world_size: number of ranks.
        timeout_s: time limit of the rendezvous and of each collective, in seconds.
        device: "cpu" for gloo, "cuda" for NCCL with a GPU for each rank.
        preload: modules to import once for all ranks; counts for the first ranks that this process starts.

    Attributes:
        processes: the process of each rank.
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
        """Let every rank run a module-level function after those submitted before.

        Raises:
            ConfigurationError: the function or its arguments cannot be pickled. All ranks are stopped then.
        """
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
        arguments: arguments of the function, the same on every rank.
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
    """Return the context of `multiprocessing` whose processes start with these modules imported.

    Its server is started here if there is none, and never interrupted: Ctrl-C would end its imports with a traceback.
    """
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
