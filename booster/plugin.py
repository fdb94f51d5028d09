"""Plugin: the interface between `Booster` and a parallel training strategy, which third parties can implement.

With it come the handle of a save and files of schedulers, which are the same for all plugins.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

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


def check_lr_scheduler(given: Any) -> None:
    """Refuse what stands where a learning-rate scheduler belongs; one of the user's own has `step` and `state_dict`."""
    if isinstance(given, torch.optim.Optimizer) or not callable(getattr(given, "step", None)):
        raise ConfigurationError(
            f"a {type(given).__name__} stands where the learning-rate scheduler belongs; write "
            "booster.save_lr_scheduler(lr_scheduler, path) and booster.load_lr_scheduler(lr_scheduler, path), or "
            "booster.save_optimizer(optimizer, directory)"
        )


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
    """Give a saved state to an object of the user; raises ConfigurationError if the object refuses it."""
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


ENTRY_POINT_GROUP = "booster.plugins"


def __getattr__(name: str) -> NoReturn:
    if name.endswith("Plugin"):
        raise ImportError(f"{name} is not here; write from plugins.hybrid_parallel import HybridParallelPlugin")
    raise AttributeError(f"module 'booster.plugin' has no attribute '{name}'")


@dataclass
class TrainingObjects:
    """Objects that are boosted together; a plugin returns the same structure with its own objects."""

    model: nn.Module | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    lr_schedulers: list[Any] = field(default_factory=list)
    dataloaders: list[DataLoader] = field(default_factory=list)
    criterion: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class PipelineResult:
    """Result of one `execute_pipeline` step.

    Attributes:
        loss: the global mean, 0-d, the same on every rank; None if it was not requested.
        outputs: the model's outputs for this rank's batch; None if they were not requested.
    """

    loss: Tensor | None = None
    outputs: Any = None

    def __getitem__(self, name: str | int) -> Any:
        """Return the attribute `name`, as of transformers' outputs."""
        return getattr(self, str(name))

    def __getattr__(self, name: str) -> NoReturn:
        has = "has .loss and .outputs; with an optimizer the backward pass has run: call optimizer.step()"
        raise AttributeError(f"what execute_pipeline returns has no {name}; it {has}")


class Plugin(ABC):
    """A parallel training strategy."""

    @abstractmethod
    def configure(self, objects: TrainingObjects) -> TrainingObjects:
        """Prepare the objects for training.

        Raises:
            ConfigurationError: the objects cannot be trained with this plugin's options; raised on every rank.
        """

    @classmethod
    def from_config(cls, path_or_dict: str | Path | dict[str, Any], **overrides: Any) -> Plugin:
        """Create the plugin from a JSON file, its contents, or a text such as `tp=2,pp=2`; optional for a plugin."""
        raise ConfigurationError(f"{cls.__name__} reads no configuration; give its options in the script")

    @classmethod
    def planned(cls, text: str, model: nn.Module, rows: int, length: int) -> Plugin:
        """Create the plugin from a text, which may ask for the fastest layout of a model; optional for a plugin.

        Args:
            text: as for `from_config`; or `auto`, or `auto,memory=24GiB`.
            model: the model to train.
            rows: samples of a step of one rank.
            length: tokens of a sample.
        """
        return cls.from_config(text)

    @classmethod
    def check_config(cls, path_or_dict: str | Path | dict[str, Any], num_ranks: int) -> str:
        """Check what `from_config` would read, for so many ranks, without a job; return the layout for people.

        Raises:
            ConfigurationError: the options are invalid, or do not fit that many ranks.
        """
        raise ConfigurationError(f"{cls.__name__} reads no configuration; give its options in the script")

    def relayout(self, plugin: Plugin, objects: TrainingObjects) -> TrainingObjects:
        """Move the state of boosted objects to new ones under the layout of `plugin`; optional for a plugin.

        Raises:
            ConfigurationError: the objects cannot move; raised on every rank, and they can be used as before.
        """
        raise ConfigurationError(f"{type(self).__name__} cannot change its layout; save and load a checkpoint")

    @abstractmethod
    def backward(
        self, loss: Tensor | tuple[Tensor, Any], optimizer: torch.optim.Optimizer, by_rows: bool = True
    ) -> None:
        """Compute the gradients of `loss` and synchronize them; see `Booster.backward`."""

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None,
        optimizer: torch.optim.Optimizer | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> PipelineResult:
        """Run the forward pass of one batch, and the backward pass if an optimizer is given."""

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> AbstractContextManager[None]:
        """Return a context in which `backward` accumulates gradients without communication."""

    def check_synchrony(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Compare the values that ranks must share; optional for a plugin.

        Raises:
            SynchronyError: the values differ.
        """
        raise ConfigurationError(f"{type(self).__name__} cannot compare ranks; use a plugin that has check_synchrony")

    def verify(self, model_fn: Callable[[], nn.Module], batch: Mapping[str, Any], **options: Any) -> Any:
        """Compare training under this plugin's layout with unsharded training; optional for a plugin.

        Raises:
            VerificationError: the two runs differ.
        """
        raise ConfigurationError(f"{type(self).__name__} cannot verify a model; use a plugin that has verify")

    def model_flops(self, model: nn.Module, batch: Mapping[str, Any]) -> float | None:
        """Return the FLOPs of the whole model's forward pass of a batch; None if they are unknown."""
        return None

    def expert_load(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the tokens of each expert in the last step, by layer; nothing if they are not counted."""
        return {}

    def peak_flops(self) -> float | None:
        """Return the FLOP/s that one device promises in the precision of training; None if it is unknown."""
        return None

    @abstractmethod
    def prepare_dataloader(self, dataset: Dataset, batch_size: int, **kwargs: Any) -> DataLoader:
        """Return a dataloader for this rank's share of `dataset`."""

    @property
    @abstractmethod
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin's checkpoint reader and writer."""


class CheckpointIO(ABC):
    """Checkpoint reader and writer of a plugin. Every method is collective: call it on all ranks."""

    @abstractmethod
    def save_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Write the model as a Hugging Face directory."""

    @abstractmethod
    def load_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Read a Hugging Face directory into the model."""

    def whole_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict of the whole model, on all ranks, in host memory; optional for a plugin."""
        raise ConfigurationError(f"{type(self).__name__} cannot gather a model; use save_model")

    def weights(self, model: nn.Module, *options: Any) -> Iterator[tuple[str, Any]]:
        """Return an iterator over the tensors that `save_model` writes; optional for a plugin."""
        raise ConfigurationError(f"{type(self).__name__} cannot stream weights; use save_model")

    @abstractmethod
    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Write the full optimizer state."""

    @abstractmethod
    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Load a state written by `save_optimizer`, under any layout."""

    @abstractmethod
    def save_checkpoint(
        self,
        directory: str,
        objects: dict[str, Any],
        extra: dict[str, Any],
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> SavedCheckpoint:
        """Write the full training state; `objects` has any of model, optimizer, lr_scheduler, dataloader."""

    def snapshot(self, folder: str, objects: dict[str, Any], extra: dict[str, Any]) -> None:
        """Leave the training state in the memory of an elastic job's machines; optional for a plugin."""
        raise ConfigurationError(f"{type(self).__name__} cannot keep snapshots in memory; use save_checkpoint")

    @abstractmethod
    def load_checkpoint(self, directory: str, objects: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
        """Load a checkpoint written by `save_checkpoint`; return the extras."""

    @abstractmethod
    def latest_checkpoint(self, folder: str) -> str | None:
        """Return the newest complete checkpoint in a folder, the same on all ranks; None if there is none."""

    @abstractmethod
    def finish_saving(self) -> None:
        """Wait for a save that runs in the background."""


def available_plugins() -> list[str]:
    """Return the sorted names of the installed plugins."""
    return sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))


def load_plugin(name: str, **options: Any) -> Plugin:
    """Create the plugin that an installed distribution registers under `name`.

    Raises:
        ConfigurationError: no distribution registers it.
    """
    return plugin_class(name)(**options)


def plugin_class(name: str = "hybrid_parallel") -> type[Plugin]:
    """Return the plugin class of that name; raises ConfigurationError if no distribution registers it."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return entry.load()
    raise ConfigurationError(f"plugin='{name}' is not installed; use one of {available_plugins()}")
