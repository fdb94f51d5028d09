"""The `booster` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from booster_cli.front import answer, needs_no_torch


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the command's code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if needs_no_torch(given):
        sys.exit(answer(given))
    from hybrid_booster.command import main as run_command

    run_command(given)
