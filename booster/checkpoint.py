"""Small state that needs no plugin: the learning-rate scheduler, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from booster.errors import ConfigurationError


def save_lr_scheduler(lr_scheduler: Any, path: str) -> None:
    """Write the state of `lr_scheduler` to `path`; rank 0 writes, all ranks wait.

    Raises:
        ConfigurationError: the state holds something that JSON cannot.
    """
    state = lr_scheduler.state_dict()
    try:
        text = json.dumps(state)
    except TypeError as error:
        raise ConfigurationError(
            f"the state of {type(lr_scheduler).__name__} cannot be written as JSON ({error}); "
            "use plain functions, not objects, in the scheduler"
        ) from None
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_text(Path(path), text)
    if dist.is_initialized():
        dist.barrier()


def load_lr_scheduler(lr_scheduler: Any, path: str) -> None:
    """Read what `save_lr_scheduler` wrote.

    Raises:
        ConfigurationError: there is no such file.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"{path} does not exist; give a file that save_lr_scheduler wrote")
    lr_scheduler.load_state_dict(json.loads(Path(path).read_text()))


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
