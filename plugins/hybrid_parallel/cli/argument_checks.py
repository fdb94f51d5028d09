"""Checks of command-line arguments before the work starts: options without effect, and files that cannot be written."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from booster.errors import ConfigurationError


def given(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [name for name, value in vars(options).items() if value != parser.get_default(name)]


def refuse_unused(found: Collection[str], used: Collection[str], what: str) -> None:
    """Refuse an option that has no effect on the requested output.

    Args:
        found: names of the options that were given.
        used: names of the options that have an effect.
        what: the requested output, such as "a model".

    Raises:
        ConfigurationError: an option has no effect.
    """
    unused = next((name for name in found if name not in used), None)
    if unused is not None:
        allowed = ", ".join(_spelled(name) for name in used)
        raise ConfigurationError(f"{_spelled(unused)} has no effect on {what}; what is used there: {allowed}")


def refuse_bad_places(*paths: Path | None) -> None:
    """Refuse output files that cannot be written, before the work starts.

    Raises:
        ConfigurationError: the directory of a file does not exist, or the path of a file is a directory.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"{path} cannot be written, {path.parent} is no directory; use one that exists")
        if path is not None and path.is_dir():
            raise ConfigurationError(f"{path} cannot be written, it is a directory; give the name of a file")


def refuse_without_pipeline(ranks: int, schedule: str | None, chunks: int | None) -> None:
    """Refuse pipeline options if the pipeline has only one rank.

    Raises:
        ConfigurationError: a schedule other than the default or a number of chunks was given.
    """
    if ranks == 1 and (schedule not in (None, "1f1b") or chunks is not None):
        option = f"--schedule {schedule}" if schedule not in (None, "1f1b") else f"--chunks {chunks}"
        raise ConfigurationError(f"{option} has no effect without a pipeline; add --pp 2, or more")


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
