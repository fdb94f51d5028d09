"""A job that the tests of this folder start: its first argument says what happens in it, the second on which rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from booster import failure
from booster.errors import ConfigurationError
from booster.launch import launch, launch_from_torch

SENTENCE = "tp_size=3 does not divide num_attention_heads=4; use 1, 2 or 4"
LONG_S = 60


def main() -> None:
    """Join, meet, and do what was asked for on the chosen rank (or on `all`); the others wait in a collective."""
    happening, where = sys.argv[1:3]
    if "HAND_RANK" in os.environ:
        launch(int(os.environ["HAND_RANK"]), 2, port=int(os.environ["HAND_PORT"]))
    else:
        launch_from_torch()
    meeting = torch.ones(1)
    dist.all_reduce(meeting)
    report(
        f"pid {os.getpid()}, met {int(meeting)}, random {torch.rand(1).item():.6f}, threads {torch.get_num_threads()}"
    )
    if where in ("all", str(dist.get_rank())):
        report(f"happens at {time.time()}")
        HAPPENINGS[happening]()
    dist.all_reduce(meeting)


def report(line: str) -> None:
    """One write, so that lines of two ranks cannot mix."""
    sys.stdout.write(f"rank {dist.get_rank()}: {line}\n")
    sys.stdout.flush()


def uncaught_error() -> None:
    raise IndexError("sample 7 is\nmissing")


def error_in_guard() -> None:
    """The main thread is busy with other things after the error, as with an emergency checkpoint."""
    try:
        with failure.guard("booster.execute_pipeline"):
            uncaught_error()
    except IndexError:
        time.sleep(LONG_S)


def handled_alike() -> None:
    """Every rank sees these, and the script handles them: no reason to end the job."""
    for error in (StopIteration("no batch is left"), ConfigurationError(SENTENCE)):
        try:
            with failure.guard("booster.execute_pipeline"):
                raise error
        except type(error):
            time.sleep(1)


def users_mistake() -> None:
    raise ConfigurationError(SENTENCE)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def own_code() -> None:
    sys.exit(7)


def nothing() -> None:
    return


def long_work() -> None:
    time.sleep(LONG_S)


HAPPENINGS: dict[str, Callable[[], None]] = {
    "nothing": nothing,
    "uncaught": uncaught_error,
    "in_guard": error_in_guard,
    "handled": handled_alike,
    "mistake": users_mistake,
    "killed": killed,
    "own_code": own_code,
    "long": long_work,
}

if __name__ == "__main__":
    main()
