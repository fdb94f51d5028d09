"""Argument parser of all `booster` commands: a mistake is one sentence, and help ends with examples."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

USAGE_ERROR = 2
_STDOUT = Path("-")


class HelpFormatter(argparse.HelpFormatter):
    """Help whose texts are wrapped, except those of several lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports a mistake as one sentence, with exit code 2.

    Args:
        examples: command lines that the help ends with.
        options: options of `argparse.ArgumentParser`.
    """

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(epilog=epilog(examples), formatter_class=HelpFormatter, **options)
        self.examples = tuple(examples)

    def error(self, message: str) -> NoReturn:
        """Print the mistake, instead of the usage, and exit."""
        self.refuse(f"{message}; `{self.prog} --help` lists what there is")

    def refuse(self, sentence: str) -> NoReturn:
        """Print one sentence about the user's mistake, and exit with code 2."""
        self.exit(USAGE_ERROR, f"error: {sentence}\n")

    def add_json(self) -> None:
        """Add the option `--json [FILE]`; see `write_json`."""
        self.add_argument(
            "--json",
            nargs="?",
            const=_STDOUT,
            type=Path,
            metavar="FILE",
            help="print the result as JSON, and nothing else; with FILE, write it there",
        )


def epilog(examples: Sequence[str]) -> str | None:
    """Return the examples as the end of a command's help."""
    return "\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else None


def prints_json(place: Path | None) -> bool:
    """Return whether stdout is for JSON alone, by the value of `--json`."""
    return place == _STDOUT


def write_json(document: Any, place: Path) -> None:
    """Write a document to the place that `--json` names: stdout, or a file."""
    text = json.dumps(document, indent=2) + "\n"
    if prints_json(place):
        sys.stdout.write(text)
    else:
        place.write_text(text, encoding="utf-8")
