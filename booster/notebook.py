"""Ranks from a notebook: a function of a cell runs on forks of this process, by torch's elastic agent."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from booster.errors import ConfigurationError, checks_arguments
from booster.failure.diagnosis import is_about_communication
from booster.launch import launch_from_torch

_SIGNALS = "SIGTERM,SIGHUP,SIGQUIT"  # SIGINT interrupts the cell
_MARK = "TORCHELASTIC_RUN_ID"


@partial(checks_arguments, example="notebook_launcher(train, args=(…), num_processes=2)")
def notebook_launcher(fn: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run `fn(*args)` on ranks that are forks of this process, and return what each returned, in rank order.

    The function may be defined in a cell, and uses what the notebook has defined. Every rank has joined the job when
    `fn` begins. What `fn` returns must be picklable: numbers, CPU tensors. Models stay in the ranks: save them there.

    Args:
        fn: what a training script does between its imports and its end.
        args: arguments of `fn`.
        num_processes: number of ranks; on GPUs at most their number.

    Raises:
        ConfigurationError: ranks cannot be forks of this process.
        RuntimeError: a rank failed; with its number and its error.
    """
    if not callable(fn):
        raise ConfigurationError(
            f"fn={fn!r} is no function; use notebook_launcher(train, args=(…)), which calls train itself"
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ConfigurationError(f"args={args!r} is no tuple of arguments; use args=({args!r},)")
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes!r} is no number of ranks; use 2")
    if _MARK in os.environ:
        raise ConfigurationError(f"this process is a rank of a job already; call {fn.__name__} itself")
    if dist.is_initialized():
        raise ConfigurationError(
            "this process has a process group of an earlier cell, which ranks would inherit; restart the notebook, or "
            "call torch.distributed.destroy_process_group()"
        )
    if torch.cuda.is_initialized():
        raise ConfigurationError(
            "CUDA is in use in this process, which ranks cannot inherit; restart the notebook, and use GPUs in fn alone"
        )
    if torch.cuda.is_available() and num_processes > torch.cuda.device_count():
        raise ConfigurationError(
            f"num_processes={num_processes} is above the number of GPUs, {torch.cuda.device_count()}; use at most that"
        )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id="notebook",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="fork",
        signals_to_handle=_SIGNALS,
    )
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the error is raised here
    try:
        results = elastic_launch(config, _on_rank)(fn, tuple(args))
    except ChildFailedError as error:
        raise RuntimeError(_told(error)) from None
    finally:
        logger.setLevel(level)
    return [results[rank] for rank in range(num_processes)]


def _told(error: ChildFailedError) -> str:
    """Return which rank failed first, its error, and where it was raised.

    Elastic names the process that ended first, which may be one whose connection another rank has closed.
    """
    rank, failed = error.get_first_failure()
    files = sorted(Path(failed.error_file).parent.parent.glob("*/error.json"))
    raised = {int(file.parent.name): json.loads(file.read_text())["message"] for file in files}
    causes = [each for each in raised if not is_about_communication(RuntimeError(raised[each]["message"]))]
    rank = rank if rank in causes or not causes else causes[0]
    if rank in raised:
        return f"rank {rank} failed: {raised[rank]['message']}\n{raised[rank]['extraInfo']['py_callstack']}"
    ended = failed.message if failed.exitcode < 0 else f"it ended with exit code {failed.exitcode}"
    return f"rank {rank} failed: {ended}"


def _on_rank(fn: Callable[..., Any], args: tuple) -> Any:
    # What OpenMP's threads of the notebook have done does not survive a fork: a second thread would wait for ever.
    torch.set_num_threads(1)
    launch_from_torch(seed=None)
    result = fn(*args)
    try:
        ForkingPickler.dumps(result)
    except Exception as error:
        what = f"what {fn.__name__} returns cannot leave its rank ({error})"
        raise TypeError(f"{what}; return numbers or CPU tensors, and save models in {fn.__name__}") from None
    return result
