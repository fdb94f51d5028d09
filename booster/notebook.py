"""Ranks from a notebook: a function of a cell runs on forks of this process, by torch's elastic agent."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from booster.errors import ConfigurationError
from booster.launch import launch_from_torch

_SIGNALS = "SIGTERM,SIGHUP,SIGQUIT"  # SIGINT interrupts the cell
_MARK = "TORCHELASTIC_RUN_ID"


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
        rank, failed = error.get_first_failure()
        raise RuntimeError(f"rank {rank} failed: {_told(failed)}") from None
    finally:
        logger.setLevel(level)
    return [results[rank] for rank in range(num_processes)]


def _told(failed: ProcessFailure) -> str:
    """Return the error of a rank, and where it was raised."""
    message = (failed.error_file_data or {}).get("message")
    if not isinstance(message, dict):
        return failed.message
    return f"{message['message']}\n{message['extraInfo']['py_callstack']}"


def _on_rank(fn: Callable[..., Any], args: tuple) -> Any:
    # What OpenMP's threads of the notebook have done does not survive a fork: a second thread would wait for ever.
    torch.set_num_threads(1)
    launch_from_torch(seed=None)
    return fn(*args)
