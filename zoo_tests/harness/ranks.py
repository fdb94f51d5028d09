"""Persistent pools of ranks, which all tests share.

Importing torch and transformers costs seconds a process, so that starting processes for every test would eat the
whole budget. `LocalRanks` forks ranks from a server that has imported them once; a pool runs test after test on its
ranks, and is thrown away (and started again when needed) as soon as one rank fails: a pool whose ranks disagree about
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
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from plugins.hybrid_parallel.distributed.local_ranks import PRELOAD, LocalRanks, RankResult, fork_server

_PRELOAD = [
    "zoo_tests.harness",  # it lets transformers import torchvision
    *PRELOAD,
    "torch._dynamo",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
]
_PREPARED = ["zoo_tests.harness.preloaded"]  # imported last
_DEVICES = {"simcuda": "zoo_tests.simcuda.device", "gpu": "zoo_tests.gpu.device"}
DEVICE_VARIABLE = "ZOO_TESTS_DEVICE"  # set by `pytest --device`
_GROUP_TIMEOUT_S = 3600.0  # no verdict: the limit of a task, which knows how busy the machine is by then, comes first
# Layouts leave process groups behind. Each of gloo's has a thread that wakes up a hundred times a second and more: with
# a hundred of them a rank, they took three quarters of both cores. Those of a new layout take 60 ms.
_MOST_GROUPS = 10
_MOST_THREADS = 40  # of a rank that has left all groups but the world and those of copied heads
# A new process takes a tenth of a second; to look for garbage among what earlier tasks have frozen, half a second.
_TASKS_OF_A_PROCESS = 100
_STACK_DUMP_S = 0.3


class RankError(AssertionError):
    """One rank or more failed, or did not answer; the message has the traceback or the stack of each."""


def under_load(seconds: float) -> float:
    """Return a time limit, given for an idle machine, for one whose processors other processes share."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def distributed(world_size: int, timeout_s: float = 90.0, device: str | None = None) -> Callable[[Callable], Callable]:
    """Run the body of a test on `world_size` ranks, each with a process group.

    Args:
        world_size: number of ranks.
        timeout_s: seconds until ranks that have not answered count as hanging, on an idle machine.
        device: "cpu", "simcuda" for the simulated CUDA device, or "gpu" for GPUs, which several ranks share where there
            are too few; None for that of `pytest --device`.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            _pool(world_size, device).run(test, args, kwargs, timeout_s)

        on_ranks.runs_on_ranks = True
        return on_ranks

    return decorate


def run_on_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    timeout_s: float = 90.0,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run a module-level function on all ranks of a pool; see `distributed` for its device.

    Returns:
        What it returned, in the order of ranks.

    Raises:
        RankError: it failed on some rank, or some rank did not answer in time.
    """
    return _pool(world_size, device).run(function, args, kwargs, timeout_s)


def rank_context() -> Any:
    """The context of `multiprocessing` whose processes start with all libraries imported."""
    return fork_server((*_PRELOAD, *_PREPARED))


def start_server(modules: Iterable[str]) -> None:
    """Start the server that forks all ranks of this process, with these modules and all models imported as well.

    Without it, each rank imports the modules of the tests that it runs. That pays where few tests are to run.
    """
    _PRELOAD.extend((*modules, "zoo_tests.harness.preloaded_models"))
    rank_context()
    forkserver.ensure_running()


class RankPool:
    """Ranks that run one function after the other, all the same.

    Args:
        world_size: number of ranks.
        mutant: the library fault to start the ranks with, see `campaigns/mutations/mutants.py`; None for none.
        device: "cpu", "simcuda" or "gpu".
    """

    def __init__(self, world_size: int, mutant: str | None = None, device: str = "cpu") -> None:
        self.world_size, self.mutant, self.device = world_size, mutant, device
        self._ranks: LocalRanks | None = None
        self._num_groups = self._num_tasks = 0

    def run(self, function: Callable, args: tuple, kwargs: dict[str, Any], timeout_s: float) -> list[Any]:
        """Run `function` on all ranks; see `run_on_ranks`."""
        if self._num_tasks == _TASKS_OF_A_PROCESS:
            self.stop()
        if self._ranks is None:
            self._start()
        if self._num_groups > _MOST_GROUPS:
            self.rest()
        self._num_tasks += 1
        try:
            self._ranks.submit(_run_task, function.__module__, function.__qualname__, args, kwargs)
            results = self._ranks.collect(lambda: under_load(timeout_s))
        except BaseException:  # nobody knows what the ranks do now
            self.stop()
            raise
        if len(results) < self.world_size or any(result.error is not None for result in results.values()):
            raise RankError(self._give_up(results))
        self._num_groups = max(self._num_groups, *(result.value[1] for result in results.values()))
        return [results[rank].value[0] for rank in range(self.world_size)]

    def rest(self) -> None:
        """Let go of all process groups, whose threads would take time from other pools."""
        if self._ranks is not None and self._num_groups > 1:
            self._ranks.submit(_destroy_groups)
        self._num_groups = 0

    def stop(self) -> None:
        """Kill all ranks; the next `run` starts new ones."""
        if self._ranks is not None:
            self._ranks.stop()
            self._directory.cleanup()
        self._ranks = None

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks = LocalRanks(self.world_size, timeout_s=_GROUP_TIMEOUT_S, preload=(*_PRELOAD, *_PREPARED))
        self._ranks.submit(_prepare, self._directory.name, self.mutant, self.device)
        self._num_tasks = 0

    def _give_up(self, results: dict[int, RankResult]) -> str:
        """Kill the pool; what there is to say about each rank that is not well."""
        errors = {rank: each.traceback or each.error for rank, each in results.items() if each.error is not None}
        silent = [rank for rank in range(self.world_size) if rank not in results]
        stacks = self._stacks(silent)
        self.stop()
        lines = [f"failed ranks {sorted(errors)}, unresponsive ranks {silent}, of {self.world_size}"]
        lines += [f"----- rank {rank} failed\n{error}" for rank, error in sorted(errors.items())]
        lines += [f"----- rank {rank} did not answer\n{stack}" for rank, stack in stacks.items()]
        return "\n".join(lines)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where each of `ranks` is right now."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._ranks.processes[rank].pid, signal.SIGUSR1)
        time.sleep(_STACK_DUMP_S if ranks else 0)
        files = {rank: _stack_file(self._directory.name, rank) for rank in ranks}
        return {rank: file.read_text() if file.exists() else "no stack" for rank, file in files.items()}


_POOLS: dict[tuple[int, str], RankPool] = {}  # by number of ranks and device
_mutant: str | None = None


def use_mutant(name: str | None) -> None:
    """Start all ranks from now on with a fault in the library (None: with the library as it is)."""
    global _mutant
    stop_pools()
    _PREPARED.clear()  # a rank imports more of the library when the fault is in it
    _mutant = name


def stop_pools() -> None:
    """Kill the ranks of all pools."""
    for pool in _POOLS.values():
        pool.stop()
    _POOLS.clear()


def _pool(world_size: int, device: str | None = None) -> RankPool:
    device = device or os.environ.get(DEVICE_VARIABLE, "cpu")
    if not _POOLS:
        atexit.register(stop_pools)
    if (world_size, device) not in _POOLS:
        _POOLS[world_size, device] = RankPool(world_size, _mutant, device)
    for which, pool in _POOLS.items():
        if which != (world_size, device):
            pool.rest()
    return _POOLS[world_size, device]


# ----- what runs in a rank -----


def _prepare(directory: str, mutant: str | None, device: str) -> None:
    """Make a new rank one of a pool."""
    import torch._dynamo
    import torch.distributed as dist

    from zoo_tests.harness.poison import poison_fresh_memory

    # Dumped by the C library's signal handler: it works while Python is blocked in a collective.
    stacks = os.open(_stack_file(directory, dist.get_rank()), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    poison_fresh_memory()
    # Workers of data loaders start as in a script, by fork; from the server, ranks inherit its way, and its imports.
    multiprocessing.set_start_method("fork", force=True)
    torch._dynamo.config.disable = True  # one test compiles the fused operators; all others would only wait
    if mutant is not None:
        importlib.import_module("zoo_tests.campaigns.mutations.mutants").apply(mutant)
    if device != "cpu":
        importlib.import_module(_DEVICES[device]).enter()


def _destroy_groups() -> None:
    """All but the world and groups that some ranks create alone, whose names and keys in the store would recur."""
    import psutil
    import torch.distributed as dist

    from shardformer.distributed.process_groups import ProcessGroups

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group.group_name.isdigit():
            dist.destroy_process_group(group)
    ProcessGroups.of_world().clear()
    del group
    gc.collect()  # their threads end with them
    if psutil.Process().num_threads() > _MOST_THREADS:
        gc.unfreeze()  # some group is part of what was in use when it was frozen
        gc.collect()


def _run_task(module: str, qualname: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Run one function from a clean state; what it returned, and the number of process groups that there are now."""
    import torch
    import torch.distributed as dist

    gc.collect()
    gc.freeze()  # what outlives a task are imported libraries, of which a look at every object takes 0.4 s
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    value = _resolve(module, qualname)(*args, **kwargs)
    return value, len(dist.distributed_c10d._world.pg_map)


def _resolve(module: str, qualname: str) -> Callable:
    """The function of that name; of a test that runs on ranks, its body."""
    function = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    return function.__wrapped__ if getattr(function, "runs_on_ranks", False) else function


def _stack_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"stack-{rank}"
