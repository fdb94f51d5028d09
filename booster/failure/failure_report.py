"""What is said of a failure: one line, which names the rank, what happened and the operation."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from booster.errors import ConfigurationError

INTERRUPTED = 130
# Of the environment: a file that gets the line too, by which `booster run` knows that it was said.
REPORT_VARIABLE = "BOOSTER_REPORT"
_MAX_MESSAGE = 600
# How gloo, NCCL and the store say that another process did not do its part.
_COMMUNICATION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|timeout|gloo|nccl|socket|waited in vain|"
    r"could not send|application timeout|store->get",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """The first error of a job, as it travels between ranks.

    Attributes:
        rank: whose failure it is.
        operation: what that rank was doing.
        kind: the exception's class; empty where other ranks found the failure.
        message: one line.
        is_users: a mistake in how the job is written, or Ctrl-C: no traceback would help.
        exit_code: of the ranks that end because of it.
    """

    rank: int
    operation: str
    kind: str
    message: str
    is_users: bool
    exit_code: int

    @classmethod
    def of(cls, error: BaseException, operation: str, rank: int) -> Failure:
        """Describe an exception in one line."""
        message = " ".join(str(error).split())[:_MAX_MESSAGE]
        interrupted = isinstance(error, KeyboardInterrupt)
        return cls(
            rank=rank,
            operation=operation,
            kind=type(error).__name__,
            message="interrupted" if interrupted else message,
            is_users=interrupted or isinstance(error, ConfigurationError),
            exit_code=INTERRUPTED if interrupted else 1,
        )

    @classmethod
    def found(cls, rank: int, message: str, operation: str = "") -> Failure:
        """What other ranks found out about a rank that cannot speak for itself."""
        return cls(rank, operation, "", message, False, 1)

    def line(self) -> str:
        """For a user's mistake the sentence alone; else also where it happened."""
        if self.exit_code == INTERRUPTED:
            return self.message
        if self.is_users:
            return f"error: {self.message}"
        if not self.kind:
            return f"error: rank {self.rank} {self.message}"
        place = f" in {self.operation}" if self.operation else ""
        return f"error on rank {self.rank}{place}: {self.kind}: {self.message}"


def is_about_communication(error: BaseException) -> bool:
    """Whether the error may follow from what another rank did, or did not do."""
    return isinstance(error, RuntimeError | OSError) and _COMMUNICATION.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Whether somebody waited in vain."""
    return isinstance(error, RuntimeError | OSError) and _TIMED_OUT.search(str(error)) is not None


def ending(status: int | None) -> str:
    """How a process ended, from what waiting for it gives; None where the system did not tell."""
    if status is None:
        return "died"
    number = status & 0x7F
    if not number:
        return f"ended with exit code {status >> 8}"
    return f"was ended by {signal_name(number)}"


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2 and 3`, `ranks 0 to 15`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
