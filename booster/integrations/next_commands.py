"""The commands by which a run of Trainer goes on, and its model is exported; scripts print them at their end."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from booster.launch import command_of_this_job


def command_to_continue(args: Any) -> str:
    """Return the command that resumes this job from its newest checkpoint, and trains as long again.

    Args:
        args: the `TrainingArguments` of this run.
    """
    if args.max_steps > 0:
        further = ("--max_steps", str(2 * args.max_steps))
    else:
        further = ("--num_train_epochs", f"{2 * args.num_train_epochs:g}")
    return command_of_this_job("--resume_from_checkpoint", "True", *further)


def command_to_export(command: str, package: str) -> str:
    """Return another tool's `command`, after that which installs `package`, with extras, if it is missing."""
    return command if find_spec(package.partition("[")[0]) else f"pip install '{package}' && {command}"
