"""Precision: the plugin's, or bf16 autocast around a model that keeps fp32 weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric import plugins as fabric_plugins
from lightning.pytorch import plugins as trainer_plugins
from torch.optim import Optimizer

from booster.errors import ConfigurationError
from booster.integrations.lightning.inner_model import boosted_in
from booster.plugin import Plugin

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


class BoostedPrecision(trainer_plugins.Precision):
    """What a Trainer does around a step, on boosted optimizers.

    Args:
        given: the precision of the Trainer.
        plugin: the parallel training strategy.
    """

    def __init__(self, given: Any, plugin: Plugin) -> None:
        self.precision = given.precision
        self._autocast = given if autocasts(given, plugin) else None

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context for the user's step: autocast, if the Trainer asks for it and the plugin does not."""
        return super().forward_context() if self._autocast is None else self._autocast.forward_context()

    def optimizer_step(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run forward and backward pass, then step: a boosted optimizer takes no closure."""
        result = closure()
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the norm of the gradients over all ranks."""
        boosted_in(optimizer).clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the gradients."""
        boosted_in(optimizer).clip_grad_value_(clip_val)


def check_precision(given: Any, plugin: Plugin) -> None:
    """Refuse a precision of Trainer or Fabric that is not the plugin's.

    Raises:
        ConfigurationError: the two values, and what would do.
    """
    if isinstance(given, BoostedPrecision):
        return
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
