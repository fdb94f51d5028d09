"""RankParser: the command line of a multi-rank script, whose messages are printed once, not once per rank."""

from __future__ import annotations

import argparse
import os
from typing import IO, Any, NoReturn


class RankParser(argparse.ArgumentParser):
    """Argument parser that prints on rank 0 only, reports an error as one sentence, and takes no shortened options."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False, **options}
        super().__init__(*args, **options)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one sentence."""
        self.exit(2, f"error: {message}\n")
