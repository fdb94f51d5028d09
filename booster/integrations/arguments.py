"""TrainingParser: options of a script and `TrainingArguments` from one command line, on many ranks."""

from __future__ import annotations

from typing import Any

from transformers import HfArgumentParser

from booster.arguments import RankParser


class TrainingParser(RankParser, HfArgumentParser):
    """transformers' `HfArgumentParser`, by which a user's mistake is one sentence, printed once.

    Example:
        ```python
        options, args = TrainingParser((Options, TrainingArguments)).parse()
        ```
    """

    def parse(self, arguments: list[str] | None = None) -> tuple[Any, ...]:
        """Return an instance of each dataclass; `arguments` are those of the command line unless given.

        An option that none of them has, or a value that one of them refuses, ends the script with exit code 2.
        """
        try:
            *parsed, unknown = self.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
        except ValueError as error:
            self.error(" ".join(str(error).split()))
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return tuple(parsed)
