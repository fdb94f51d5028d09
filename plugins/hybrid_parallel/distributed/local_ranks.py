"""Short-lived ranks on this machine, started by commands: every wait has a limit, and none outlives its parent."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from booster.errors import ConfigurationError

# Imported once for all ranks: the imports take longer than the work.
_PRELOAD = (
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
        ConfigurationError: if the function raised one on a rank.
        RankFailure: if a rank failed otherwise, or did not end in time.
    """
    import torch.distributed as dist

    deadline = time.monotonic() + timeout_s
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    processes, here = [], []
    try:
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            place = (rank, world_size, store.port, timeout_s, device)
            process = context.Process(target=_serve, args=(place, theirs, function, arguments), daemon=True)
            _start(process)
            theirs.close()
            processes.append(process)
            here.append(mine)
        return _collect(here, deadline, timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: a new process would run the training script, which seldom guards against that."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start(process: Any) -> None:
    try:
        with _without_main():
            process.start()
    except Exception as error:  # objects that cannot be pickled raise errors of many types
        raise ConfigurationError(
            f"the arguments cannot be sent to other processes ({error}); define the model's class in a "
            "module of its own"
        ) from None


def devices_for(world_size: int) -> str:
    """Return "cuda" if there is a GPU for each of `world_size` ranks, otherwise "cpu"."""
    import torch

    return "cuda" if torch.cuda.device_count() >= world_size else "cpu"


def _collect(connections: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    """Collect the results of the ranks, in order; the first failure shortens the deadline."""
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    results: dict[int, Any] = {}
    failures: dict[int, tuple[bool, str]] = {}
    while waiting and time.monotonic() < deadline:
        for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(connection)
            try:
                failure, result = connection.recv()
            except EOFError:
                failure, result = (False, "its process was ended"), None
            results[rank] = result
            if failure is not None:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    mistakes = [text for is_mistake, text in failures.values() if is_mistake]
    if mistakes:
        raise ConfigurationError(mistakes[0])
    if failures:
        rank, (_, text) = next(iter(failures.items()))
        raise RankFailure(f"rank {rank}: {text}")
    if waiting:
        late = ", ".join(str(rank) for rank in sorted(waiting.values()))
        raise RankFailure(f"ranks {late} of {len(connections)} did not answer within {timeout_s:g} s")
    return [results[rank] for rank in range(len(connections))]


# ----- what runs in a rank -----


def _serve(
    place: tuple[int, int, int, float, str],
    connection: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.disable(logging.WARNING)  # warnings that every rank would repeat
    failure, result = None, None
    try:
        _join(*place)
        result = function(*arguments)
    except ConfigurationError as error:
        failure = (True, str(error))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        where = f"{os.path.basename(last.filename)}, line {last.lineno}"
        failure = (False, f"{type(error).__name__}: {text} ({where})")
    connection.send((failure, result))
    connection.poll(None)  # stay until the other ranks have read what they were sent
    os._exit(0)


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
