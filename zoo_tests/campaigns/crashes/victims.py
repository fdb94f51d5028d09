"""What runs in ranks that are going to be killed: a few complete saves, and one in which it happens."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardformer.distributed.process_groups import all_gather_json
from zoo_tests.campaigns.crashes.controls import CONTROLS
from zoo_tests.campaigns.crashes.marked import MarkedTraining
from zoo_tests.campaigns.crashes.system_calls import SystemCalls
from zoo_tests.harness.ranks import rank_context

KINDS = ("new names", "one name", "keep_last=2")
MOMENTS = ("before a call", "in a write", "at a time")
ARMED = "armed"
KILLED, SURVIVED, FAILED, HUNG = -signal.SIGKILL, 3, 4, 5  # exit codes; SURVIVED another's death
_DEADLINE_S = 45.0
_TIMEOUT = timedelta(seconds=30)
_COMPLETE = 3  # saves before the one that is hit


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when.

    Attributes:
        kind: how the saves are named.
        asynchronous: whether training goes on while they are written.
        world_size: number of ranks.
        trigger: the rank that finds that it is time.
        everybody: whether all ranks are killed then, or that one alone.
        moment: one of `MOMENTS`.
        fraction: at which part of the save, of its calls or of its time.
        control: a fault put into the library, to see the campaign notice it.
    """

    kind: str
    asynchronous: bool
    world_size: int
    trigger: int
    everybody: bool
    moment: str
    fraction: float
    control: str | None = None

    @property
    def complete(self) -> list[int]:
        """Steps that were saved before, and are to be there afterwards."""
        return {"new names": [1, 2, 3], "one name": [3], "keep_last=2": [3]}[self.kind]

    @property
    def pending(self) -> int:
        """The step whose save is hit."""
        return _COMPLETE + 1

    @property
    def options(self) -> dict[str, Any]:
        """Of the save."""
        return {"keep_last": 2} if self.kind == "keep_last=2" else {}

    def path(self, folder: Path, step: int) -> Path:
        """Where a step is saved."""
        return folder / ("state" if self.kind == "one name" else f"step-{step}")


class Nursery:
    """A process without threads that has imported everything: ranks that are forked from it live at once."""

    def __init__(self) -> None:
        self._requests, theirs = rank_context().Pipe()
        self._process = rank_context().Process(target=_raise_ranks, args=(theirs,), daemon=True)
        self._process.start()

    def lives(self, kill: Kill, directory: Path) -> list[int]:
        """Let ranks live and die; exit codes of all of them, `HUNG` for one that did not end."""
        self._requests.send((kill, directory))
        return self._requests.recv()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _raise_ranks(requests: Connection) -> None:
    while True:
        kill, directory = requests.recv()
        pids = []
        for rank in range(kill.world_size):
            pids.append(os.fork())
            if pids[-1] == 0:
                _live(rank, kill, directory)
        deadline = time.monotonic() + _DEADLINE_S
        requests.send([_exit_code(pid, deadline) for pid in pids])


def _exit_code(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HUNG


# ----- what runs in a rank -----


def _live(rank: int, kill: Kill, directory: Path) -> None:
    try:
        _run(rank, kill, directory)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(FAILED)


def _run(rank: int, kill: Kill, directory: Path) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # survivors have a lot to say
    store = dist.FileStore(str(directory / "store"), kill.world_size)
    dist.init_process_group("gloo", rank=rank, world_size=kill.world_size, store=store, timeout=_TIMEOUT)
    if kill.control is not None:
        mock.patch.object(*CONTROLS[kill.control]).start()
    training, folder = MarkedTraining(), directory / "saves"
    for step in range(1, kill.pending):
        began = time.perf_counter()
        with SystemCalls() as calls:
            _save(training, kill, folder, step)
        duration = time.perf_counter() - began
    pids = all_gather_json(os.getpid())
    if rank == kill.trigger:
        (directory / ARMED).touch()
        _arm(kill, pids if kill.everybody else [os.getpid()], calls.names, duration)
    try:
        _save(training, kill, folder, kill.pending)
    except RuntimeError:
        os._exit(SURVIVED)
    os._exit(0)


def _save(training: MarkedTraining, kill: Kill, folder: Path, step: int) -> None:
    training.save(kill.path(folder, step), step, asynchronous=kill.asynchronous, **kill.options)
    if kill.asynchronous:
        training.mark(-1)  # training goes on
        training.booster.finish_saving()


def _arm(kill: Kill, pids: Sequence[int], calls: Sequence[str], duration: float) -> None:
    """Kill `pids` at the moment; `calls` and `duration` are those of a save like the one to come."""
    if kill.moment == "at a time":
        threading.Timer(kill.fraction * duration, _kill, [pids]).start()
        return
    in_write = kill.moment == "in a write"
    candidates = [number for number, name in enumerate(calls) if name == "pwrite" or not in_write]
    chosen = candidates[int(kill.fraction * len(candidates))]

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == chosen:
            if in_write and name == "pwrite":
                file, data, position = args
                os.pwrite(file, data[: len(data) // 2], position)
            _kill(pids)

    SystemCalls(before).__enter__()


def _kill(pids: Sequence[int]) -> None:
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)
