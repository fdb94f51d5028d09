"""One rank that stops at every single call of a save in turn: without processes, and so without chance.

It stops by an exception that nothing handles, where SIGKILL would end it: what has reached the disk is the same.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from unittest import mock

from zoo_tests.campaigns.crashes.campaign import look
from zoo_tests.campaigns.crashes.controls import CONTROLS
from zoo_tests.campaigns.crashes.marked import MarkedTraining
from zoo_tests.campaigns.crashes.system_calls import SystemCalls
from zoo_tests.campaigns.crashes.victims import Kill


class Stopped(BaseException):
    """The process has ended here."""


def stop_at_every_call(kind: str, directory: Path, control: str | None = None) -> tuple[list[str], list[str], int]:
    """On one rank: save often, and stop one call later each time.

    Returns:
        The calls of a whole save; what was wrong after stopping before one of them, in words; how often the new
        checkpoint was there.
    """
    kill = Kill(kind, False, 1, 0, True, "before a call", 0.0, control)
    training = MarkedTraining()
    fault = mock.patch.object(*CONTROLS[control]) if control else contextlib.nullcontext()
    with fault:
        for step in range(1, kill.pending):
            training.save(kill.path(directory / "before", step), step, **kill.options)
        names, problems, published = _calls(training, kill, directory), [], 0
        for stop, name in enumerate(names):
            folder = directory / str(stop)
            shutil.copytree(directory / "before", folder)
            _stop(training, kill, folder, stop)
            is_new, found = look(kill, folder)
            problems += [f"before call {stop}, {name}: {problem}" for problem in found]
            published += is_new
            shutil.rmtree(folder)
    return names, problems, published


def _calls(training: MarkedTraining, kill: Kill, directory: Path) -> list[str]:
    """Those of an undisturbed save."""
    shutil.copytree(directory / "before", directory / "undisturbed")
    with SystemCalls() as calls:
        training.save(kill.path(directory / "undisturbed", kill.pending), kill.pending, **kill.options)
    return calls.names


def _stop(training: MarkedTraining, kill: Kill, folder: Path, stop: int) -> None:
    def before(number: int, *_: object) -> None:
        if number >= stop:  # whatever follows does not happen any more
            raise Stopped

    with SystemCalls(before), contextlib.suppress(Stopped):
        training.save(kill.path(folder, kill.pending), kill.pending, **kill.options)
