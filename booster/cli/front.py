"""The list of commands, and what is answered without them: help, versions, and a command that does not exist."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version

from booster.cli.command_parser import CommandParser, write_json
from booster.cli.init import main as copy_example

ENTRY_POINT_GROUP = "booster.commands"
# Command -> module with `main(arguments) -> exit code` and `parser()`, and its help line. The module is imported only
# when the command is used; None for a command that a plugin registers as an entry point.
COMMANDS: dict[str, tuple[str | None, str]] = {
    "run": ("booster.cli.run", "start a script on several ranks of this machine, or of several"),
    "plan": (None, "predict memory and time of every layout of a model, and write the best as JSON"),
    "inspect": (None, "show who holds what of a model; a pipeline schedule, predicted or as it ran"),
    "verify": (None, "train a tiny model of the same class sharded and unsharded; show where they differ first"),
    "doctor": ("booster.cli.doctor", "show versions, devices, what is missing, and how fast ranks reach each other"),
    "init": ("booster.cli.init", "copy an example into the current folder"),
    "completion": ("booster.cli.completion", "print the completion script of a shell"),
}
_EPILOG = """\
examples:
  booster init bert
  booster run --nproc-per-node 4 script.py
  booster plan config.json --devices 64 --device H100
  booster --version --json

exit codes:
  0    all went well
  1    what was asked for failed: layouts differ, none fits, a package is missing
  2    a mistake in the command line; nothing was started
  130  interrupted by Ctrl-C
  `booster run` exits with the code of the rank that failed first, or 128 + N if signal N ended it"""


def needs_no_torch(arguments: Sequence[str]) -> bool:
    """Return whether `answer` can run these arguments."""
    name = arguments[0] if arguments else ""
    return name == "init" or name not in commands()


def answer(arguments: Sequence[str]) -> int:
    """Copy an example, print help or versions, or refuse a command that does not exist; return the exit code."""
    name = arguments[0] if arguments else ""
    if name == "init":
        return copy_example(arguments[1:])
    top = parser()
    if not name.startswith("-"):
        problem = f"command '{name}' does not exist" if name else "no command was given"
        top.refuse(f"{problem}; use one of {', '.join(commands())}, as in `booster run --help`")
    options = top.parse_args(arguments)
    if not options.version:
        top.refuse(f"no command was given; use one of {', '.join(commands())}, as in `booster run --help`")
    if options.json is not None:
        write_json(versions(), options.json)
    else:
        sys.stdout.writelines(f"{name} {number or '(not installed)'}\n" for name, number in versions().items())
    return 0


def parser() -> CommandParser:
    """Return the parser of `booster` without its commands' options."""
    top = CommandParser(prog="booster", description="Hybrid-parallel training of Hugging Face models.")
    top.epilog = _EPILOG
    top.add_argument("--version", action="store_true", help="show the versions of booster, torch and transformers")
    top.add_json()
    subparsers = top.add_subparsers(dest="command", metavar="command")
    for name, (_, line) in commands().items():
        subparsers.add_parser(name, help=line, add_help=False)
    return top


def commands() -> dict[str, tuple[str | None, str]]:
    """Return the commands, including those of installed plugins: name -> module and help line."""
    installed = entry_points(group=ENTRY_POINT_GROUP)
    found = {entry.name: (None, f"from {entry.value.partition('.')[0]}") for entry in installed}
    return COMMANDS | {name: command for name, command in found.items() if name not in COMMANDS}


def versions() -> dict[str, str | None]:
    """Return the versions of this package and of what it stands on; None for what is not installed."""
    found = {"booster": version_of("hybrid-booster")}
    found |= {name: version_of(name) for name in ("torch", "transformers")}
    return found | {"python": platform.python_version()}


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
