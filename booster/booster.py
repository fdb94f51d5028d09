"""Booster: the facade that a training script talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from booster import failure
from booster.checkpoint import SavedCheckpoint, load_lr_scheduler, save_lr_scheduler
from booster.errors import ConfigurationError
from booster.plugin import PipelineResult, Plugin, TrainingObjects, load_plugin

_KEYWORDS = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")


class Booster:
    """Turns ordinary training objects into parallel ones, and runs them.

    Example:
        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
        model, optimizer, dataloader = booster.boost(model, optimizer, dataloader)

    Args:
        plugin: how to train in parallel, or the name of an installed plugin.
    """

    def __init__(self, plugin: Plugin | str) -> None:
        self.plugin = load_plugin(plugin) if isinstance(plugin, str) else plugin
        self._criterion: Callable[[Any, Any], Any] | None = None

    @failure.guard("booster.boost")
    def boost(self, *objects: Any, **named: Any) -> Any:
        """Prepare training objects for parallel training.

        Args:
            objects: one module, optimizers, learning-rate schedulers, dataloaders and one criterion, in any order.
            named: the same as `model=`, `optimizer=`, `criterion=`, `dataloader=`, `lr_scheduler=`.

        Returns:
            The boosted objects in the order given; one object comes back by itself.

        Raises:
            ConfigurationError: an object of another kind, two models, or a layout that the model does not allow.
        """
        unknown = sorted(set(named) - set(_KEYWORDS))
        if unknown:
            raise ConfigurationError(f"boost() got the keyword '{unknown[0]}'; use {', '.join(_KEYWORDS)}")
        given = [value for value in (*objects, *named.values()) if value is not None]
        boosted = self._configure(given)
        results = tuple(None if value is None else boosted[id(value)] for value in (*objects, *named.values()))
        return results[0] if len(results) == 1 else results

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute gradients in an ordinary loop (`pp_size=1`): takes the place of `loss.backward()`."""
        self.plugin.backward(loss, optimizer)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> PipelineResult:
        """Take one batch and run it forward, and backward where an optimizer is given, under any layout.

        Args:
            data_iter: an iterator over batches (mappings of tensors, samples along dim 0), or one batch.
            model: the boosted model.
            criterion: (outputs, batch) -> mean over the samples, or (sum, count); None for the criterion given to
                `boost`, else the model's own loss (`labels` in the batch).
            optimizer: the boosted optimizer; None to evaluate only.
            return_loss: whether to compute the global mean of the loss on every rank.
            return_outputs: whether to return the model's outputs for this replica's batch, on every rank.

        Returns:
            An object with `.loss` (0-d) and `.outputs`.
        """
        return self.plugin.execute_pipeline(
            data_iter, model, criterion or self._criterion, optimizer, return_loss, return_outputs
        )

    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> AbstractContextManager[None]:
        """A context in which `backward` accumulates gradients without communication."""
        return self.plugin.no_sync(model, optimizer)

    def check_synchrony(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compare what ranks have to share: parameters, tied weights, learning rates, loss scale, random streams.

        To be called on all ranks.

        Raises:
            SynchronyError: they differ, on all ranks alike, with the first difference.
        """
        self.plugin.check_synchrony(model, optimizer)

    @failure.guard("booster.save_model")
    def save_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Write a Hugging Face directory that plain `from_pretrained` opens."""
        self.plugin.checkpoint_io.save_model(model, str(directory), **options)

    @failure.guard("booster.load_model")
    def load_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Read the weights of a Hugging Face directory."""
        self.plugin.checkpoint_io.load_model(model, str(directory), **options)

    @failure.guard("booster.save_optimizer")
    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Write the optimizer's whole state, which opens under any layout."""
        self.plugin.checkpoint_io.save_optimizer(optimizer, str(directory))

    @failure.guard("booster.load_optimizer")
    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Read what `save_optimizer` wrote."""
        self.plugin.checkpoint_io.load_optimizer(optimizer, str(directory))

    def save_lr_scheduler(self, lr_scheduler: Any, path: str) -> None:
        """Write the scheduler's state as JSON."""
        save_lr_scheduler(lr_scheduler, str(path))

    def load_lr_scheduler(self, lr_scheduler: Any, path: str) -> None:
        """Read what `save_lr_scheduler` wrote."""
        load_lr_scheduler(lr_scheduler, str(path))

    @failure.guard("booster.save_checkpoint")
    def save_checkpoint(
        self,
        directory: str,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        asynchronous: bool = False,
        keep_last: int | None = None,
        **extra: Any,
    ) -> SavedCheckpoint:
        """Write the whole training state; it appears under its name when it is complete, checked and on the disk.

        Args:
            asynchronous: copy the state, and write it while training goes on; an error surfaces at the next call that
                saves or loads, or at `finish_saving`.
            keep_last: afterwards remove all but so many of the newest checkpoints in the folder of `directory`.
            extra: anything that JSON can hold.

        Returns:
            A handle: `.stall_s` is what training waited, `.wait()` the end of the save.

        Raises:
            ConfigurationError: it cannot be written, or the asynchronous save before it failed; on all ranks alike.
        """
        objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}
        return self.plugin.checkpoint_io.save_checkpoint(str(directory), objects, extra, asynchronous, keep_last)

    @failure.guard("booster.load_checkpoint")
    def load_checkpoint(
        self,
        directory: str,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        resume: str | None = None,
    ) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, under this layout or another; returns the extras.

        Args:
            resume: "latest": `directory` is a folder of checkpoints; the newest one that is whole is read.

        Raises:
            ConfigurationError: there is none, a file is damaged, or it is that of other objects; on all ranks alike.
        """
        objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}
        return self.plugin.checkpoint_io.load_checkpoint(str(directory), objects, resume)

    def latest_checkpoint(self, folder: str) -> str | None:
        """The newest complete checkpoint in `folder`, the same on all ranks; None if there is none yet."""
        return self.plugin.checkpoint_io.latest_checkpoint(str(folder))

    def finish_saving(self) -> None:
        """Wait for an asynchronous save.

        Raises:
            ConfigurationError: it failed; on all ranks alike.
        """
        self.plugin.checkpoint_io.finish_saving()

    def _configure(self, given: list[Any]) -> dict[int, Any]:
        """Boost the objects together; id of each given object -> the boosted one."""
        kinds: dict[str, list[Any]] = {
            "model": [],
            "optimizer": [],
            "lr_scheduler": [],
            "dataloader": [],
            "criterion": [],
        }
        for value in given:
            kinds[_kind(value)].append(value)
        for kind in ("model", "criterion"):
            if len(kinds[kind]) > 1:
                raise ConfigurationError(f"boost() got {len(kinds[kind])} objects of the kind '{kind}'; give one")
        model = kinds["model"][0] if kinds["model"] else None
        self._criterion = kinds["criterion"][0] if kinds["criterion"] else self._criterion
        boosted = self.plugin.configure(
            TrainingObjects(model, kinds["optimizer"], kinds["lr_scheduler"], kinds["dataloader"], self._criterion)
        )
        after = [boosted.model, *boosted.optimizers, *boosted.lr_schedulers, *boosted.dataloaders]
        before = [model, *kinds["optimizer"], *kinds["lr_scheduler"], *kinds["dataloader"]]
        by_id = {id(old): new for old, new in zip(before, after, strict=True) if old is not None}
        return by_id | {id(criterion): criterion for criterion in kinds["criterion"]}


def _kind(value: Any) -> str:
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, LRScheduler | ReduceLROnPlateau):
        return "lr_scheduler"
    if isinstance(value, DataLoader):
        return "dataloader"
    # A loss module (nn.CrossEntropyLoss) has no parameters: it is a criterion, not a model.
    if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
        return "model"
    if callable(value):
        return "criterion"
    raise ConfigurationError(
        f"boost() cannot take a {type(value).__name__}; "
        "give a module, optimizers, learning-rate schedulers, dataloaders or a criterion"
    )
