"""Kinds of values on the command line."""

from __future__ import annotations

import argparse
from typing import Any


def positive_int(text: str) -> int:
    """Parse an integer of at least 1, for `type=`."""
    return _checked(text, int, "an integer of at least 1", lambda value: value >= 1)


def positive_float(text: str) -> float:
    """Parse a finite number above 0, for `type=`."""
    return _checked(text, float, "a number above 0", lambda value: 0 < value < float("inf"))


def _checked(text: str, kind: Any, rule: str, holds: Any) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}") from None
    if not holds(value):
        raise argparse.ArgumentTypeError(f"{text} is not {rule}")
    return value
