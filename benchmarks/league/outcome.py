"""What can become of a class in a system, and how it is told."""

from __future__ import annotations

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
    """

    kind: str
    why: str = ""
    seconds: float = 0.0


class RefusedError(Exception):
    """A system does not take a model or a layout, and says so."""


def shortened(error: object, length: int = 160) -> str:
    """Return a message in one line for a table."""
    text = " ".join(str(error).split()).replace("|", "/") or type(error).__name__
    return text if len(text) <= length else text[: length - 1] + "…"
