"""A checkpoint of Trainer or Fabric: a folder with the state of all ranks, and a file of what Lightning saves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.lightning.optimizers import boosted_in
from shardformer.lazy.weight_files import WeightFileError, refuses_code

_STATE, _FILE, _FURTHER = "booster", "lightning.ckpt", "optimizer_{}"


@dataclass(frozen=True)
class CheckpointFolder:
    """Writes and reads checkpoints that open under any layout.

    Attributes:
        booster: saves and loads the model and its optimizers.
        io: Lightning's writer and reader of a file.
        writes: whether this rank writes what all ranks have.
        barrier: waits for all ranks.
    """

    booster: Booster
    io: Any
    writes: bool
    barrier: Callable[[], None]

    def save(self, path: Any, model: nn.Module | None, optimizers: Sequence[Any], rest: dict[str, Any]) -> None:
        """Write a checkpoint under a temporary name, and rename it when it is complete.

        Args:
            optimizers: boosted optimizers of the model.
            rest: what Lightning saves; a value for each key.
        """
        final, optimizers = _local(path), [boosted_in(each) for each in optimizers]
        made = final.with_name(f".{final.name}.unfinished")
        if self.writes:
            shutil.rmtree(made, ignore_errors=True)
        self.barrier()
        if model is not None:
            first = {"optimizer": optimizers[0]} if optimizers else {}
            self.booster.save_checkpoint(made / _STATE, model=model, **first)
            for number, optimizer in enumerate(optimizers[1:], start=1):
                self.booster.save_optimizer(optimizer, made / _FURTHER.format(number))
        if self.writes:
            self.io.save_checkpoint(rest, made / _FILE)
            if final.is_file():
                final.unlink()
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
        self.barrier()

    def rest(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what Lightning saved.

        Raises:
            ConfigurationError: if there is no such checkpoint.
        """
        folder = _local(path)
        if not (folder / _FILE).is_file():
            problem = "is a file of plain Lightning" if folder.is_file() else "is no checkpoint of this strategy"
            raise ConfigurationError(
                f"{folder} {problem}; give the folder that trainer.save_checkpoint() or fabric.save() wrote, or load "
                "weights into the model before training, without ckpt_path"
            )
        try:
            with refuses_code(str(folder / _FILE)):
                return self.io.load_checkpoint(folder / _FILE, weights_only=weights_only)
        except WeightFileError as error:
            raise ConfigurationError(str(error)) from None

    def load(self, path: Any, model: nn.Module | None, optimizers: Sequence[Any]) -> None:
        """Load the states of a model and its optimizers.

        Raises:
            ConfigurationError: if the checkpoint has none, or that of another model.
        """
        folder, optimizers = _local(path), [boosted_in(each) for each in optimizers]
        if model is None and not optimizers:
            return
        objects = {} if model is None else {"model": model}
        if optimizers:
            objects["optimizer"] = optimizers[0]
        self.booster.load_checkpoint(folder / _STATE, **objects)
        for number, optimizer in enumerate(optimizers[1:], start=1):
            self.booster.load_optimizer(optimizer, folder / _FURTHER.format(number))


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise ConfigurationError(f"{path} is not a folder that all ranks share; save to a file system")
    return Path(path)
