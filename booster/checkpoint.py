"""Checkpoint parts that are independent of the plugin: the handle of a save, and files of schedulers."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from booster.errors import ConfigurationError
from shardformer.distributed.process_groups import world_group
from shardformer.utils.typed_json import from_json, read_json_object, to_json


class SavedCheckpoint:
    """Handle of a checkpoint save, finished or in progress.

    Args:
        path: final location of the checkpoint.
        stall_s: seconds that training waited for the save.
        work: the rest of the save in the background; None if the save is finished.

    Attributes:
        has_raised: whether `wait` has raised the error of a failed save, so that nothing else does.
    """

    def __init__(self, path: Path, stall_s: float, work: Future[float] | None = None) -> None:
        self.path, self.stall_s = path, stall_s
        self._work, self.has_raised = work, False

    @property
    def is_finished(self) -> bool:
        """Whether the save has ended; a failed save is finished too."""
        return self._work is None or self._work.done()

    def wait(self) -> float:
        """Wait until the save has finished on all ranks.

        Returns:
            Seconds from the call until everything was on disk.

        Raises:
            ConfigurationError: the save failed.
        """
        if self._work is None:
            return self.stall_s
        self.has_raised = self._work.exception() is not None
        return self._work.result()


def save_lr_scheduler(lr_scheduler: Any, path: str) -> None:
    """Write the state of `lr_scheduler` to `path`; rank 0 writes, all ranks wait.

    Raises:
        ConfigurationError: a part of the state cannot be kept.
    """
    try:
        text = json.dumps(to_json(lr_scheduler.state_dict(), f"{type(lr_scheduler).__name__}.state_dict()"))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_text(Path(path), text)
    if dist.is_initialized():
        dist.barrier(world_group())


def load_lr_scheduler(lr_scheduler: Any, path: str) -> None:
    """Load a state written by `save_lr_scheduler`.

    Raises:
        ConfigurationError: the file does not exist, or does not hold a valid JSON object or the state of another class.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"{path} does not exist; give a file that save_lr_scheduler wrote")
    try:
        state = from_json(read_json_object(Path(path)))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    take_state(lr_scheduler, state, "lr_scheduler")


def take_state(given: Any, state: Any, name: str) -> None:
    """Give a saved state to an object of the user.

    Raises:
        ConfigurationError: its `load_state_dict` raises any error, or the state is that of another scheduler.
    """
    _check_class(given, state, name)
    try:
        given.load_state_dict(state)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{name}.load_state_dict() does not take the saved state ({type(error).__name__}: {error}); make "
            f"the {name} as it was when it was saved"
        ) from error


def _check_class(given: Any, state: Any, name: str) -> None:
    """Refuse the state of another scheduler, which torch would take: the attributes of both, and the rates of neither.

    Classes of torch have all their attributes from the start; one of the user may get some later.
    """
    if not isinstance(given, LRScheduler):
        return
    saved, present = ({key for key in each if key[0] != "_"} for each in (state, given.state_dict()))
    is_torchs = type(given).__module__ == LRScheduler.__module__
    if saved ^ present and (is_torchs or not saved or (saved - present and present - saved)):
        raise ConfigurationError(
            f"the saved state is that of another {name} than this {type(given).__name__}: one of them alone has "
            f"'{min(saved ^ present)}'; make the {name} as it was when it was saved"
        )
    for inner, its in zip(getattr(given, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        _check_class(inner, its, name)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
