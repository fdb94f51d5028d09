"""Which part of a LightningModule is boosted: the attribute that has the weights to train.

The LightningModule itself stays as it is, with its metrics, its hyper-parameters and the models that it does not train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.lightning.inner_model import NamedOptimizer, ReplicaShares, bind_own_methods, connect


def model_attribute(module: LightningModule) -> str:
    """Return the name of the attribute that holds the model: all weights to train, or the only weights.

    Raises:
        ConfigurationError: if there is no such attribute, or several.
    """
    kind = type(module).__name__
    loose = next((name for name, param in module.named_parameters(recurse=False) if param.requires_grad), None)
    if loose is not None:
        raise ConfigurationError(f"{kind}.{loose} lies outside of the model that is boosted; move it into the model")
    weights = {name: list(child.parameters()) for name, child in module.named_children()}
    weights = {name: params for name, params in weights.items() if params}
    trained = {name: [param for param in params if param.requires_grad] for name, params in weights.items()}
    trained = {name: params for name, params in trained.items() if params} or weights
    everything = {param for params in trained.values() for param in params}
    whole = next((name for name, params in trained.items() if everything <= set(params)), None)
    if not trained:
        raise ConfigurationError(f"{kind} has no weights; make its model an attribute, as in self.model = ...")
    if whole is None:
        listed = " and ".join(f"self.{name}" for name in trained)
        raise ConfigurationError(
            f"{kind} holds {len(trained)} models, {listed}, and one is boosted; put what is trained into one module, "
            "and freeze the others by requires_grad_(False)"
        )
    return whole


def boost_inside(
    module: nn.Module, optimizers: Sequence[Optimizer], booster: Booster, shares: ReplicaShares
) -> tuple[nn.Module, list[Any]]:
    """Boost a model, or the one inside a LightningModule, together with its optimizers.

    Returns:
        The boosted model, or the LightningModule; the boosted optimizers.

    Raises:
        ConfigurationError: if the model does not allow the layout, or an optimizer holds other weights.
    """
    name = model_attribute(module) if isinstance(module, LightningModule) else None
    model = module if name is None else getattr(module, name)
    known = {param for param in model.parameters()}
    for optimizer in optimizers:
        if any(param not in known for group in optimizer.param_groups for param in group["params"]):
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds weights outside of the model that is boosted"
                f"{'' if name is None else f', self.{name}'}; give it the parameters of that model alone"
            )
    boosted, *made = booster.boost(model, *optimizers) if optimizers else (booster.boost(model),)
    made = [NamedOptimizer.of(each) for each in made]
    bind_own_methods(boosted)
    shares.attach(boosted)
    if name is None:
        return boosted, made
    setattr(module, name, boosted)
    connect(module, shares)
    return module, made
