"""Dispatch of the `booster` subcommands; a user's mistake becomes one sentence and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from booster.errors import ConfigurationError
from booster.extensions import load_extension

_INTERRUPTED = 130
_USAGE_ERROR = 2
ENTRY_POINT_GROUP = "booster.commands"
# Command -> module with `main(arguments) -> exit code`, and its help line. The module is imported only when the command
# is used; None for a command that a plugin registers as an entry point.
_COMMANDS: dict[str, tuple[str | None, str]] = {
    "run": ("booster.cli.run", "start a script on several ranks of this machine, or of several"),
    "plan": (None, "predict memory and time of every layout of a model, and write the best as JSON"),
    "inspect": (None, "show who holds what of a model; a pipeline schedule, predicted or as it ran"),
    "verify": (None, "train a tiny model of the same class sharded and unsharded; show where they differ first"),
    "doctor": ("booster.cli.doctor", "show versions, devices, what is missing, and how fast ranks reach each other"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the command's code."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        code = _USAGE_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = _INTERRUPTED
    except BrokenPipeError:  # `booster doctor | head`
        sys.stderr.close()
        code = 0
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name.startswith("-"):
        _parser().parse_args(arguments)
    if name not in _COMMANDS:
        problem = f"command '{name}' does not exist" if name else "no command was given"
        raise ConfigurationError(f"{problem}; use one of {', '.join(_COMMANDS)}, as in `booster run --help`")
    module, _ = _COMMANDS[name]
    command = _command_of_a_plugin(name) if module is None else import_module(module).main
    return command(arguments[1:])


def _command_of_a_plugin(name: str) -> Callable[[list[str]], int]:
    return load_extension(ENTRY_POINT_GROUP, name, wanted=f"`booster {name}`")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="booster", description="Hybrid-parallel training of Hugging Face models.")
    parser.add_argument("--version", action="version", version=f"booster {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (_, line) in _COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    return parser


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports an error as one sentence."""

    def error(self, message: str) -> None:
        """Raise a parsing error as a `ConfigurationError`, instead of printing the usage and ending the process."""
        raise ConfigurationError(f"{message}; `{self.prog} --help` lists what there is")


def _version() -> str:
    try:
        return version("hybrid-booster")
    except PackageNotFoundError:
        return "(not installed)"
