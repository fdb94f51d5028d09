"""Failure messages: one line that names the rank, the event and the operation."""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from booster.errors import ConfigurationError

INTERRUPTED = 130
# Exit code of ranks of an elastic job that leave together at a step boundary (EX_TEMPFAIL of sysexits.h).
LEFT = 75
# Environment variable: a file that receives the line too; it tells `booster run` that the failure was reported.
REPORT_VARIABLE = "BOOSTER_REPORT"
# Set in ranks whose layout is from the command line: what does not fit it is a mistake there.
LAYOUT_VARIABLE = "BOOSTER_TAKEN_OVER"
_MAX_MESSAGE = 600
# Error messages of gloo, NCCL and the store if another process did not do its part.
_COMMUNICATION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|timeout|gloo|nccl|socket|waited without an "
    r"answer|could not send|application timeout|store->get",
    re.IGNORECASE,
)
# What the kernel says of a connection whose other end has not answered for long.
_UNANSWERED = re.compile(r"connection timed out|no route to host|network is unreachable", re.IGNORECASE)
# A plugin in the words of a message, whose options the user of a command line gives otherwise.
_PLUGIN = re.compile(r"(plugin=)?HybridParallelPlugin\(([^()]*)\)")
_ROOT = Path(__file__).resolve().parents[2]
# Folders of code that is not the user's: of Python and what it has installed, and of this library.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    *(f"{_ROOT / name}{os.sep}" for name in ("booster", "plugins", "shardformer", "hybrid_booster")),
)
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """First failure of a job, as exchanged between ranks."""

    rank: int  # rank that failed
    operation: str  # operation that this rank was in
    kind: str  # class name of the exception; empty if other ranks detected the failure
    message: str  # message in one line
    is_users: bool  # whether it is a mistake in the user's script, or Ctrl-C, where a traceback would not help
    exit_code: int  # exit code of the ranks that end because of it

    @classmethod
    def of(cls, error: BaseException, operation: str, rank: int) -> Failure:
        """Create a failure from an exception, with its message in one line."""
        message = " ".join(str(error).split())
        interrupted = isinstance(error, KeyboardInterrupt)
        is_of_command_line = isinstance(error, ConfigurationError) and os.environ.get(LAYOUT_VARIABLE)
        if is_of_command_line:
            message = _PLUGIN.sub(_as_layout, message)
        message = "interrupted" if interrupted else message[:_MAX_MESSAGE]
        if isinstance(error, ConfigurationError) and not is_of_command_line:
            message += _line_of_script(error)
        return cls(
            rank=rank,
            operation=operation,
            kind=type(error).__name__,
            message=message,
            is_users=interrupted or isinstance(error, ConfigurationError),
            exit_code=INTERRUPTED if interrupted else 2 if is_of_command_line else 1,
        )

    @classmethod
    def found(cls, rank: int, message: str, operation: str = "") -> Failure:
        """Create a failure that other ranks detected, of a rank that cannot report it itself."""
        return cls(rank, operation, "", message, False, 1)

    def line(self) -> str:
        """Return the line to print: for a user's mistake only the message, else also where it happened."""
        if self.exit_code == INTERRUPTED:
            return self.message
        if self.is_users:
            return f"error: {self.message}"
        if not self.kind:
            return f"error: rank {self.rank} {self.message}"
        place = f" in {self.operation}" if self.operation else ""
        return f"error on rank {self.rank}{place}: {self.kind}: {self.message}"


def _line_of_script(error: BaseException) -> str:
    """Return the user's line that raised `error`, or called what did, as ` (train.py, line 12)`; empty if none did."""
    inner = reversed(list(traceback.walk_tb(error.__traceback__)))
    around = traceback.walk_stack(sys._getframe())
    for frame, line in chain(inner, around):
        path = frame.f_code.co_filename
        if Path(path).is_file() and not path.startswith(_LIBRARIES):
            return f" ({path.removeprefix(os.getcwd() + os.sep)}, line {line})"
    return ""


def _as_layout(plugin: re.Match[str]) -> str:
    return " ".join(["--layout", re.sub("[ '\"]", "", plugin[2])]).rstrip()


def is_about_communication(error: BaseException) -> bool:
    """Return whether the error may be a consequence of another rank's failure."""
    return isinstance(error, RuntimeError | OSError) and _COMMUNICATION.search(str(error)) is not None


def is_unanswered(error: BaseException) -> bool:
    """Return whether the error is of a connection to a machine that does not answer."""
    return isinstance(error, RuntimeError | OSError) and _UNANSWERED.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return whether the error is a timeout."""
    return isinstance(error, RuntimeError | OSError) and _TIMED_OUT.search(str(error)) is not None


def ending(status: int | None) -> str:
    """Describe how a process ended.

    Args:
        status: wait status of the process; None if it is unknown.
    """
    if status is None:
        return "died"
    number = status & 0x7F
    if not number:
        return f"ended with exit code {status >> 8}"
    return f"was ended by {signal_name(number)}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Format a list of ranks: `rank 3`, `ranks 0, 2 and 3`, `ranks 0 to 15`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
