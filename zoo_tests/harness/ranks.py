"""Persistent pools of ranks, which all tests share.

Importing torch and transformers costs seconds a process, so that starting processes for every test would eat the
whole budget. A fork server imports them once; a pool of ranks forks from it in a fraction of a second, runs test after
test, and is thrown away (and started again when needed) as soon as one rank fails: a pool whose ranks disagree about
what comes next is of no use to anybody.

A test runs on ranks by `@distributed(world_size)`; code that chooses the number by itself calls `run_on_ranks`. The
function travels by name, its arguments by pickle.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
)
_GROUP_TIMEOUT = timedelta(seconds=60)
_LOOK_AGAIN = 50  # tasks
# Layouts leave process groups behind. Each of gloo's has a thread that wakes up a hundred times a second and more: with
# a hundred of them a rank, they took three quarters of both cores. Those of a new layout take 60 ms.
_MOST_GROUPS = 24
_TASKS_OF_A_PROCESS = 400
_REST = -1  # in the place of the number of a task
_GRACE_S = 1.0  # for the other ranks to fail too, once one has
_STACK_DUMP_S = 0.3


class RankError(AssertionError):
    """One rank or more failed, or did not answer; the message has the traceback or the stack of each."""


def distributed(world_size: int, timeout_s: float = 90.0) -> Callable[[Callable], Callable]:
    """Run the body of a test on `world_size` ranks, each with a gloo process group.

    Args:
        world_size: number of ranks.
        timeout_s: seconds until ranks that have not answered count as hanging.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            _pool(world_size).run(test, args, kwargs, timeout_s)

        on_ranks.runs_on_ranks = True
        return on_ranks

    return decorate


def run_on_ranks(world_size: int, function: Callable, *args: Any, timeout_s: float = 90.0, **kwargs: Any) -> list[Any]:
    """Run a module-level function on all ranks of a pool.

    Returns:
        What it returned, in the order of ranks.

    Raises:
        RankError: it failed on some rank, or some rank did not answer in time.
    """
    return _pool(world_size).run(function, args, kwargs, timeout_s)


def rank_context() -> Any:
    """The context of `multiprocessing` whose processes start with all libraries imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


class RankPool:
    """Processes that run one function after the other, all the same.

    Args:
        world_size: number of ranks.
        mutant: the library fault to start the ranks with, see `campaigns/mutations/mutants.py`; None for none.
    """

    def __init__(self, world_size: int, mutant: str | None = None) -> None:
        self.world_size, self.mutant = world_size, mutant
        self._context = rank_context()
        self._processes: list[Any] = []
        self._num_groups = 0
        self._task_numbers = itertools.count()

    def run(self, function: Callable, args: tuple, kwargs: dict[str, Any], timeout_s: float) -> list[Any]:
        """Run `function` on all ranks; see `run_on_ranks`."""
        number = next(self._task_numbers)
        if number % _TASKS_OF_A_PROCESS == 0:
            self.stop()
        if not self._processes:
            self._start()
        if self._num_groups > _MOST_GROUPS:
            self.rest()
        for tasks in self._tasks:
            tasks.put((number, function.__module__, function.__qualname__, args, kwargs))
        answers = self._collect(number, timeout_s)
        errors = {rank: error for rank, (error, _) in answers.items() if error is not None}
        if errors or len(answers) < self.world_size:
            raise RankError(self._give_up(errors, answers))
        return [answers[rank][1] for rank in range(self.world_size)]

    def rest(self) -> None:
        """Let go of all process groups, whose threads would take time from other pools."""
        if self._processes and self._num_groups > 1:
            for tasks in self._tasks:
                tasks.put((_REST,))
        self._num_groups = 0

    def stop(self) -> None:
        """Kill all ranks; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._processes:
            self._directory.cleanup()
        self._processes = []

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._results = self._context.Queue()
        self._tasks = [self._context.Queue() for _ in range(self.world_size)]
        self._store = _new_store()
        self._processes = [
            self._context.Process(
                target=_serve,
                args=(
                    rank,
                    self.world_size,
                    self._directory.name,
                    self._store.port,
                    self._tasks[rank],
                    self._results,
                    self.mutant,
                ),
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        for process in self._processes:
            process.start()

    def _collect(self, number: int, timeout_s: float) -> dict[int, tuple[str | None, Any]]:
        """Rank -> (error, result) of those that answered before the deadline, which the first error brings near."""
        answers: dict[int, tuple[str | None, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.world_size and time.monotonic() < deadline:
            try:
                answered, rank, error, result, num_groups = self._results.get(timeout=0.2)
            except queue.Empty:
                if any(not process.is_alive() for process in self._processes):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                continue
            if answered != number:
                continue
            answers[rank] = (error, result)
            self._num_groups = max(self._num_groups, num_groups)
            if error is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def _give_up(self, errors: dict[int, str], answers: dict[int, Any]) -> str:
        """Kill the pool; what there is to say about each rank that is not well."""
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        stacks = self._stacks(silent)
        self.stop()
        lines = [f"failed ranks {sorted(errors)}, unresponsive ranks {silent}, of {self.world_size}"]
        lines += [f"----- rank {rank} failed\n{error}" for rank, error in sorted(errors.items())]
        lines += [f"----- rank {rank} did not answer\n{stack}" for rank, stack in stacks.items()]
        return "\n".join(lines)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where each of `ranks` is right now."""
        alive = [rank for rank in ranks if self._processes[rank].is_alive()]
        for rank in alive:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(_STACK_DUMP_S if alive else 0)
        stacks = {}
        for rank in ranks:
            dump = _stack_file(self._directory.name, rank)
            died = f"the process died, exit code {self._processes[rank].exitcode}"
            stacks[rank] = died if rank not in alive else dump.read_text() if dump.exists() else "no stack"
        return stacks


_POOLS: dict[int, RankPool] = {}
_mutant: str | None = None


def use_mutant(name: str | None) -> None:
    """Start all ranks from now on with a fault in the library (None: with the library as it is)."""
    global _mutant
    stop_pools()
    _mutant = name


def stop_pools() -> None:
    """Kill the ranks of all pools."""
    for pool in _POOLS.values():
        pool.stop()
    _POOLS.clear()


def _pool(world_size: int) -> RankPool:
    if not _POOLS:
        atexit.register(stop_pools)
    if world_size not in _POOLS:
        _POOLS[world_size] = RankPool(world_size, _mutant)
    for size, pool in _POOLS.items():
        if size != world_size:
            pool.rest()
    return _POOLS[world_size]


# ----- what runs in a rank -----


def _new_store() -> Any:
    """Where ranks meet. Not a file: ranks that wait on one look again and again, and take the cores from the others."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _serve(rank: int, world_size: int, directory: str, port: int, tasks: Any, results: Any, mutant: str | None) -> None:
    """Run tasks until killed."""
    import torch
    import torch._dynamo
    import torch.distributed as dist

    from zoo_tests.harness.poison import poison_fresh_memory

    # Dumped by the C library's signal handler: it works while Python is blocked in a collective.
    with _stack_file(directory, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_GROUP_TIMEOUT)
        poison_fresh_memory()
        torch._dynamo.config.disable = True  # one test compiles the fused operators; all others would only wait
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=_GROUP_TIMEOUT)
        if mutant is not None:
            importlib.import_module("zoo_tests.campaigns.mutations.mutants").apply(mutant)
        while True:
            number, *task = tasks.get()
            if number == _REST:
                _destroy_groups()
                continue
            if number % _LOOK_AGAIN == 0:
                gc.unfreeze()  # what was in use when it was frozen, and is no more
            error, result = _run_task(*task)
            results.put((number, rank, error, result, len(dist.distributed_c10d._world.pg_map)))


def _destroy_groups() -> None:
    """All but the world."""
    import torch.distributed as dist

    from shardformer.distributed.process_groups import ProcessGroups

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    ProcessGroups.of_world().clear()
    del group
    gc.collect()  # their threads end with them


def _run_task(module: str, qualname: str, args: tuple, kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """Run one function from a clean state; (traceback, None) or (None, what it returned)."""
    import torch

    gc.collect()
    gc.freeze()  # what outlives a task are imported libraries, of which a look at every object takes 0.4 s
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        return None, _resolve(module, qualname)(*args, **kwargs)
    except BaseException as error:
        # The first entry is this function: of no interest.
        lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
        sys.stdout.flush()
        return "".join(lines), None


def _resolve(module: str, qualname: str) -> Callable:
    """The function of that name; of a test that runs on ranks, its body."""
    function = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    return function.__wrapped__ if getattr(function, "runs_on_ranks", False) else function


def _stack_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"stack-{rank}"
