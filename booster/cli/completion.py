"""`booster completion`: print a script by which a shell completes commands, options and their values.

The script is static: it lists what the parsers of all installed commands know, and starts no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from booster.cli import front
from booster.cli.command_parser import CommandParser
from booster.cli.main import load_command
from booster.errors import ConfigurationError

SHELLS = ("bash", "zsh")


def main(arguments: Sequence[str]) -> int:
    """Print the script."""
    options = parser().parse_args(arguments)
    try:
        import shtab
    except ImportError:
        raise ConfigurationError(
            "`booster completion` needs the package shtab; pip install 'hybrid-booster[completion]'"
        ) from None
    sys.stdout.write(shtab.complete(_whole_parser(shtab.FILE), shell=options.shell) + "\n")
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    command = CommandParser(
        prog="booster completion",
        description="Print a script by which a shell completes commands, options and their values.",
        examples=(
            "source <(booster completion bash)",
            "booster completion bash > ~/.local/share/bash-completion/completions/booster",
            "booster completion zsh > ~/.zfunc/_booster",
        ),
    )
    command.add_argument("shell", choices=SHELLS, help="the shell that is to complete")
    return command


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    return import_module(load_command(name).__module__).parser()


def _whole_parser(file: dict[str, str]) -> argparse.ArgumentParser:
    """Return a parser of all commands with their options; `file`: shtab's mark of an option that takes a file."""
    whole = argparse.ArgumentParser(prog="booster")
    whole.add_argument("--version", action="store_true", help="show versions")
    subparsers = whole.add_subparsers(dest="command")
    for name, (_, line) in front.commands().items():
        own = parser_of(name)
        command = subparsers.add_parser(name, help=line, parents=[own], add_help=not own.add_help)
        for action in command._actions:  # argparse has no public list of them
            if action.type is Path or action.dest in ("model", "training_script"):
                action.complete = file
    return whole
