"""Plugin: what a way of training in parallel has to offer to `Booster`. Third parties can implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from booster.checkpoint import SavedCheckpoint
from booster.errors import ConfigurationError

ENTRY_POINT_GROUP = "booster.plugins"


@dataclass
class TrainingObjects:
    """What is boosted together; a plugin returns the same with its own objects in the same places."""

    model: nn.Module | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    lr_schedulers: list[Any] = field(default_factory=list)
    dataloaders: list[DataLoader] = field(default_factory=list)
    criterion: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class PipelineResult:
    """What one step of `execute_pipeline` found.

    Attributes:
        loss: the global mean, 0-d, the same on every rank; None when it was not asked for.
        outputs: the model's outputs for this rank's batch; None when they were not asked for.
    """

    loss: Tensor | None = None
    outputs: Any = None


class Plugin(ABC):
    """A way of training in parallel."""

    @abstractmethod
    def configure(self, objects: TrainingObjects) -> TrainingObjects:
        """Prepare the objects for training.

        Raises:
            ConfigurationError: they cannot be trained as this plugin was asked to, on all ranks alike.
        """

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradients of `loss` and synchronise them."""

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
        """Run one batch forward, and backward where an optimizer is given."""

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> AbstractContextManager[None]:
        """A context in which `backward` accumulates gradients without communication."""

    def check_synchrony(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Compare what ranks have to share; not every plugin can.

        Raises:
            SynchronyError: they differ.
        """
        raise ConfigurationError(f"{type(self).__name__} cannot compare ranks; use a plugin that has check_synchrony")

    def verify(self, model_fn: Callable[[], nn.Module], batch: Mapping[str, Any], **options: Any) -> Any:
        """Compare a training under this plugin's layout with a plain one; not every plugin can.

        Raises:
            VerificationError: they differ.
        """
        raise ConfigurationError(f"{type(self).__name__} cannot verify a model; use a plugin that has verify")

    @abstractmethod
    def prepare_dataloader(self, dataset: Dataset, batch_size: int, **kwargs: Any) -> DataLoader:
        """A loader of this rank's share of `dataset`."""

    @property
    @abstractmethod
    def checkpoint_io(self) -> CheckpointIO:
        """How this plugin saves and loads."""


class CheckpointIO(ABC):
    """How a plugin saves and loads. Every method is called on all ranks."""

    @abstractmethod
    def save_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Write a Hugging Face directory."""

    @abstractmethod
    def load_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Read a Hugging Face directory into the model."""

    @abstractmethod
    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Write the optimizer's whole state."""

    @abstractmethod
    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Read what `save_optimizer` wrote, under any layout."""

    @abstractmethod
    def save_checkpoint(
        self,
        directory: str,
        objects: dict[str, Any],
        extra: dict[str, Any],
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> SavedCheckpoint:
        """Write the whole training state; `objects` has any of model, optimizer, lr_scheduler, dataloader."""

    @abstractmethod
    def load_checkpoint(self, directory: str, objects: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote; returns the extras."""

    @abstractmethod
    def latest_checkpoint(self, folder: str) -> str | None:
        """The newest complete checkpoint of a folder, the same on all ranks; None if there is none."""

    @abstractmethod
    def finish_saving(self) -> None:
        """Wait for a save that goes on in the background."""


def available_plugins() -> list[str]:
    """Names of the installed plugins."""
    return sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))


def load_plugin(name: str, **options: Any) -> Plugin:
    """Make the plugin that an installed distribution offers under `name`.

    Raises:
        ConfigurationError: no distribution offers it.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return entry.load()(**options)
    raise ConfigurationError(f"plugin='{name}' is not installed; use one of {available_plugins()}")
