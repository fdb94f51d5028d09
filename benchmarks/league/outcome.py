"""What can become of a class in a system, and how it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

EXACT, WRONG, UNCUT, REFUSED, CRASHED, HUNG, NOT_PLAIN = OUTCOMES = (
    "exact",
    "wrong",
    "nothing cut",
    "refused",
    "crashed",
    "hung",
    "not trained plainly",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a class.

    Attributes:
        kind: one of `OUTCOMES`.
        why: the first module that differs, or the message; empty if it is exact.
        seconds: of a training step, forward to update; 0 if there was none.
        plain_seconds: of a step of plain training by the same processes; 0 if it was not measured.
        place: the function of transformers' modelling code in which it crashed; empty outside of that code.
    """

    kind: str
    why: str = ""
    seconds: float = 0.0
    plain_seconds: float = 0.0
    place: str = ""


class RefusedError(Exception):
    """A system does not take a model or a layout, and says so."""


@contextmanager
def refusals() -> Iterator[None]:
    """Take the messages with which a library turns a model down while it prepares it for refusals, not for crashes.

    Raises:
        RefusedError: the library raised an error that it uses for what it does not support, with a message.
    """
    try:
        yield
    except (ValueError, NotImplementedError, AssertionError) as error:
        if not str(error):
            raise
        raise RefusedError(str(error)) from error


def shortened(error: object, length: int = 200) -> str:
    """Return a message in one line for a table."""
    text = " ".join(str(error).split()).replace("|", "/") or type(error).__name__
    return text if len(text) <= length else text[: length - 1] + "…"
