"""Command lines of multi-rank scripts: a message is printed once, not once per rank."""

from __future__ import annotations

import argparse
import os
from typing import IO, Any, NoReturn


class RankParser(argparse.ArgumentParser):
    """Argument parser that prints on rank 0 only, and reports an error as one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **options)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


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
