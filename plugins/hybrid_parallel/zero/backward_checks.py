"""Refusal of backward passes whose gradients would differ from the gradients of the global batch."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from booster.errors import ConfigurationError
from shardformer.layers.partial_gradients import hook_gradient


def refuse_backward(model: nn.Module) -> None:
    """Refuse backward passes into a model without an optimizer: nothing would sum its gradients over ranks."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            hook_gradient(parameter, _refuse)


def _refuse(gradient: Tensor) -> NoReturn:
    raise ConfigurationError(
        "backward() reached a model that was boosted without its optimizer, so that nothing sums its gradients over "
        "ranks; use model, optimizer = booster.boost(model, optimizer) and booster.backward(loss, optimizer)"
    )
