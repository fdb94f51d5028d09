"""Ranks that end by themselves, for tests of how a job ends: what each wrote, and its exit code.

They have torchrun's environment variables, and join by what the function under test does. They are forked from the
pool's server, which has imported the libraries; exit handlers and the hook for uncaught errors run as in any process.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo_tests.harness.ports import free_port
from zoo_tests.harness.ranks import rank_context, under_load


@dataclass(frozen=True)
class EndedRank:
    """What a rank left.

    Attributes:
        code: exit code of its process; None if it had to be killed.
        out, err: what it wrote.
    """

    code: int | None
    out: str
    err: str


def run_to_the_end(
    world_size: int, function: Callable, *args: Any, folder: Path, timeout_s: float = 60.0
) -> list[EndedRank]:
    """Run a module-level function in a new process for each rank; kill those that run for longer than `timeout_s`.

    Args:
        world_size: number of ranks.
        function, args: what each runs, and with what.
        folder: for what they write.
        timeout_s: limit in seconds, on an idle machine.
    """
    port = free_port()
    job = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    job |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(world_size):
        own = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = rank_context().Process(target=_run, args=(function, args, own, folder / str(rank)), daemon=True)
        process.start()
        processes.append(process)
    until = time.monotonic() + under_load(timeout_s)
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [
        EndedRank(code, *((folder / f"{rank}.{stream}").read_text() for stream in ("out", "err")))
        for rank, code in enumerate(codes)
    ]


def _run(function: Callable, args: tuple[Any, ...], environment: dict[str, str], output: Path) -> None:
    """Run the function as the main script of a process."""
    os.environ |= environment
    for stream, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    code = 0
    try:
        function(*args)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
