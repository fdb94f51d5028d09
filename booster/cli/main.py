"""Dispatch of the `booster` subcommands; a user's mistake becomes one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from booster.cli.command_parser import USAGE_ERROR
from booster.cli.front import ENTRY_POINT_GROUP, answer, commands, needs_no_torch
from booster.errors import ConfigurationError
from booster.extensions import load_extension

_INTERRUPTED = 130
Command = Callable[[list[str]], int]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the command's code."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        code = USAGE_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = _INTERRUPTED
    except BrokenPipeError:  # `booster doctor | head`
        sys.stderr.close()
        code = 0
    sys.exit(code)


def load_command(name: str) -> Command:
    """Return the function of a command, whose module has `parser()`; raises ConfigurationError if there is none."""
    module, _ = commands()[name]
    if module is None:
        return load_extension(ENTRY_POINT_GROUP, name, wanted=f"`booster {name}`")
    return import_module(module).main


def _run(arguments: list[str]) -> int:
    return answer(arguments) if needs_no_torch(arguments) else load_command(arguments[0])(arguments[1:])
