"""What Trainer and Fabric are asked for that cannot hold under a layout, each refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import IterableDataset

from booster.errors import ConfigurationError

# Class of callbacks -> why, and what to do instead.
_CALLBACKS = {
    callbacks.StochasticWeightAveraging: "it averages a copy of the whole weights, which no rank has; use "
    "torch.optim.swa_utils.AveragedModel(self.model) in on_train_batch_end",
    callbacks.WeightAveraging: "it averages a copy of the whole weights, which no rank has; use "
    "torch.optim.swa_utils.AveragedModel(self.model) in on_train_batch_end",
    callbacks.ModelPruning: "it replaces weights that a layout cuts; prune the model before training",
    callbacks.LearningRateFinder: "it trains with an optimizer of its own; choose a learning rate with a small model",
    callbacks.BatchSizeFinder: "one rank that runs out of memory would leave the others waiting; ask `booster plan`",
}


def check_plugin(plugin: Any) -> None:
    """Refuse a strategy without layout.

    Raises:
        ConfigurationError: if `plugin` is missing.
    """
    if plugin is None:
        raise ConfigurationError(
            "HybridParallelStrategy() got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)"
        )


def check_devices(strategy: Any) -> None:
    """Refuse numbers of devices that are not those of the job, and synchronized batch norms.

    Raises:
        ConfigurationError: both numbers.
    """
    devices, machines = strategy.parallel_devices or [], strategy.num_nodes
    kind = strategy.root_device.type
    if devices and devices[0].type != kind:
        raise ConfigurationError(
            f"accelerator={devices[0].type!r} is not where this job's ranks are, on {kind!r}; leave it out, or use "
            f"accelerator={kind!r}"
        )
    counted, world_size = len(devices) * machines, strategy.world_size
    # A single device may be what `devices="auto"` finds, which counts no processes.
    if counted != world_size and (len(devices), machines) != (1, 1):
        raise ConfigurationError(
            f"devices={len(devices)} on num_nodes={machines} makes {counted} processes, and this job has {world_size}; "
            f"start the script with `booster run --nproc-per-node {len(devices)}`, or leave devices out"
        )
    if strategy._layer_sync is not None:
        raise ConfigurationError(
            "sync_batchnorm=True replaces modules of a model that a layout cuts; leave it out, and use a model with "
            "layer norms"
        )


def check_module(module: LightningModule) -> None:
    """Refuse a LightningModule whose backward pass or compilation cannot hold.

    Raises:
        ConfigurationError: the reason, and what to use.
    """
    name = type(module).__name__
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ConfigurationError(
            f"{name} is compiled, and torch.compile cannot trace the communication of a boosted model; use "
            "HybridParallelPlugin(compile_layers=True)"
        )
    for method in ("toggle_optimizer", "untoggle_optimizer"):
        if getattr(type(module), method) is not getattr(LightningModule, method):
            raise ConfigurationError(
                f"{name} has its own {method}(), which would find pieces of parameters in optimizers; leave it out, "
                "and set requires_grad of self.model's parameters in training_step()"
            )
    if is_overridden("backward", module, parent=LightningModule):
        raise ConfigurationError(
            f"{name} has its own backward(), which would not run the passes of a layout; leave it out: "
            "training_step() returns the loss, or calls self.manual_backward(loss)"
        )


def check_callbacks(trainer: Any) -> None:
    """Refuse callbacks that would need whole weights on each rank.

    Raises:
        ConfigurationError: the callback, the reason, and what to use.
    """
    for callback in trainer.callbacks:
        reason = next((why for kind, why in _CALLBACKS.items() if isinstance(callback, kind)), None)
        if reason is not None:
            raise ConfigurationError(f"{type(callback).__name__}: {reason}")


def check_predictions(trainer: Any, dataloader: Any) -> None:
    """Refuse a writer of predictions, which would be told no indices of samples.

    Raises:
        ConfigurationError: what to use.
    """
    writer = next((each for each in trainer.callbacks if isinstance(each, callbacks.BasePredictionWriter)), None)
    if writer is not None and not isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        raise ConfigurationError(
            f"{type(writer).__name__} is told which samples a rank has, which loaders of replicas do not say; return "
            "the samples' own indices from predict_step, and write what trainer.predict returns"
        )


def check_options_of_backward(method: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse options of `torch.Tensor.backward`, which a layout runs otherwise.

    Raises:
        ConfigurationError: if there is one.
    """
    if args or kwargs:
        given = ", ".join([*map(str, args), *kwargs])
        raise ConfigurationError(f"{method} cannot take {given} under a layout; leave it out")


def check_loss(loss: Tensor | tuple[Tensor, Any], model: str) -> None:
    """Refuse a loss without gradients.

    Args:
        loss: a mean, or (sum, count).
        model: how the user calls the boosted model.

    Raises:
        ConfigurationError: if it does not depend on the model.
    """
    value = loss[0] if isinstance(loss, tuple) and loss else loss
    if isinstance(value, Tensor) and not value.requires_grad:
        raise ConfigurationError(
            "the loss does not depend on the boosted model, so that there are no gradients; compute it from the "
            f"outputs of {model}"
        )
