"""What a Trainer or a Fabric is asked for and no layout can hold, each refused in one sentence.

Precision is the plugin's, or bf16 autocast around a model that keeps fp32 weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric import plugins as fabric_plugins
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch import plugins as trainer_plugins
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from booster.errors import ConfigurationError
from booster.plugin import Plugin
from booster.wrappers import ModelWrapper

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

_DEFAULT, _AUTOCAST = "32-true", "bf16-mixed"
# Precision of the plugin -> values of `Trainer(precision=...)` that mean the same. The default says nothing.
_SAME = {
    "fp32": (_DEFAULT, _AUTOCAST),
    "bf16": (_DEFAULT, _AUTOCAST, "bf16-true"),
    "fp16": (_DEFAULT, "16-mixed", "16-true"),
    "fp8": (_DEFAULT, _AUTOCAST, "bf16-true", "transformer-engine"),
}
_INSTEAD = {"bf16": "bf16-", "fp16": "16-", "fp8": "transformer-engine"}
_KNOWN = (
    *(trainer_plugins.Precision, trainer_plugins.MixedPrecision, trainer_plugins.HalfPrecision),
    *(fabric_plugins.Precision, fabric_plugins.MixedPrecision, trainer_plugins.DoublePrecision),
)


def check_devices(strategy: Any) -> None:
    """Refuse numbers of devices that are not those of the job, and synchronized batch norms."""
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
    """Refuse a LightningModule whose backward pass or compilation cannot hold."""
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
    """Refuse callbacks that would need whole weights on each rank."""
    for callback in trainer.callbacks:
        reason = next((why for kind, why in _CALLBACKS.items() if isinstance(callback, kind)), None)
        if reason is not None:
            raise ConfigurationError(f"{type(callback).__name__}: {reason}")


def check_predictions(trainer: Any, dataloader: Any) -> None:
    """Refuse a writer of predictions, which would be told no indices of samples."""
    writer = next((each for each in trainer.callbacks if isinstance(each, callbacks.BasePredictionWriter)), None)
    if writer is not None and not isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        raise ConfigurationError(
            f"{type(writer).__name__} is told which samples a rank has, which loaders of replicas do not say; return "
            "the samples' own indices from predict_step, and write what trainer.predict returns"
        )


def check_options_of_backward(method: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse options of `torch.Tensor.backward`, which a layout runs otherwise."""
    if args or kwargs:
        given = ", ".join([*map(str, args), *kwargs])
        raise ConfigurationError(f"{method} cannot take {given} under a layout; leave it out")


def check_loss(loss: Tensor | tuple[Tensor, Any], model: str) -> None:
    """Refuse a loss, mean or (sum, count), without gradients; `model`: how the user calls the boosted one."""
    value = loss[0] if isinstance(loss, tuple) and loss else loss
    if isinstance(value, Tensor) and not value.requires_grad:
        raise ConfigurationError(
            "the loss does not depend on the boosted model, so that there are no gradients; compute it from the "
            f"outputs of {model}"
        )


def check_precision(given: Any, plugin: Plugin) -> None:
    """Refuse a precision of Trainer or Fabric that is not the plugin's."""
    precision = getattr(plugin, "precision", "fp32")
    if type(given) not in _KNOWN and given.precision != "transformer-engine":
        raise ConfigurationError(
            f"{type(given).__name__} converts modules that a layout cuts; leave it out, and give the precision to the "
            "plugin, as in HybridParallelPlugin(precision='bf16')"
        )
    name = given.precision
    if name in _SAME.get(precision, (_DEFAULT,)):
        return
    if name == "64-true":
        raise ConfigurationError(
            "precision='64-true' would convert a model that is sharded already; leave it out, and build the model with "
            "dtype=torch.float64, which HybridParallelPlugin() keeps"
        )
    wanted = next((mine for mine, start in _INSTEAD.items() if name.startswith(start)), "fp32")
    raise ConfigurationError(
        f"precision={name!r} is not the plugin's precision {precision!r}; leave it out, or use "
        f"HybridParallelPlugin(precision={wanted!r})"
    )


def autocasts(given: Any, plugin: Plugin) -> bool:
    """Return whether steps run under autocast: the plugin keeps the weights in fp32."""
    return given.precision == _AUTOCAST and getattr(plugin, "precision", "fp32") == "fp32"


def boosted_inside(module: nn.Module) -> ModelWrapper | None:
    """Return the boosted model: the module itself, or an attribute of a LightningModule; None before it is boosted."""
    if isinstance(module, ModelWrapper):
        return module
    return next((child for child in module.children() if isinstance(child, ModelWrapper)), None)


def attribute_of_boosted(module: nn.Module) -> str:
    """Return the name of the attribute that holds the boosted model."""
    return next(name for name, child in module.named_children() if isinstance(child, ModelWrapper))


def refuse_shards(module: LightningModule, *given: Any) -> None:
    """Refuse a state dict of shards: it looks whole, and other code writes it to a file."""
    if _has_part(module):
        raise ConfigurationError(
            f"{type(module).__name__}.state_dict() would have this rank's part of self.{attribute_of_boosted(module)} "
            "alone; on all ranks call trainer.strategy.whole_state_dict(), which returns the whole one, "
            "trainer.strategy.save_model(directory) or trainer.save_checkpoint(path)"
        )


def refuse_whole_weights(module: LightningModule, *given: Any) -> None:
    """Refuse whole weights for a module of which this rank has a part."""
    if _has_part(module):
        raise ConfigurationError(
            f"{type(module).__name__}.load_state_dict() takes whole weights, of which this rank has a part; on all "
            f"ranks call trainer.strategy.booster.load_model(self.{attribute_of_boosted(module)}, directory), or load "
            "the weights before training"
        )


def _has_part(module: LightningModule) -> bool:
    model = boosted_inside(module)
    return model is not None and not getattr(model, "is_whole", True)
