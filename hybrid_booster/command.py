"""The `booster` command, independent of modules in the current directory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hybrid_booster import import_from_here

# Without its parent, which would import torch.
import_from_here("booster.cli")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the command's code."""
    from booster.cli.front import answer, needs_no_torch

    given = list(sys.argv[1:] if arguments is None else arguments)
    if needs_no_torch(given):
        sys.exit(answer(given))
    before = signal.signal(signal.SIGINT, _interrupted)
    try:
        _ = import_from_here("booster").__version__  # before a module in it, which would be loaded twice
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed; pip install hybrid-booster brings it")
    from booster.cli.main import main as run_command

    signal.signal(signal.SIGINT, before)
    run_command(given)


def _interrupted(*_: Any) -> NoReturn:
    """End at Ctrl-C while libraries are imported, some of which turn a KeyboardInterrupt into another error."""
    sys.stderr.write("interrupted\n")
    os._exit(130)
