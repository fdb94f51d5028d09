"""The boosted model inside a LightningModule, and the methods of the module that reach the model's parameters.

The attribute that has the weights to train is boosted. The LightningModule itself stays as it is, with its metrics, its
hyper-parameters and the models that it does not train.

A value that a step logs is a mean over this replica's samples. The mean over replicas is the mean over all samples if
each replica counts by its samples, also those of a short last batch. `Booster.backward` weighs gradients so by itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from booster.booster import Booster
from booster.data.rows import main_input_of, rows_of_call, unknown_rows
from booster.errors import ConfigurationError
from booster.integrations.lightning import checks
from booster.integrations.lightning.checks import boosted_inside
from booster.integrations.replicas import Replicas
from booster.wrappers import ModelWrapper, OptimizerWrapper


class ReplicaShares:
    """Shares of the batches that one rank's models have seen."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._weight = 1.0  # samples of the batch at hand, as a multiple of the mean over replicas
        self._in_step = False

    def attach(self, model: nn.Module) -> None:
        """Count the samples of the batches that a boosted model is called with from now on."""
        if self.replicas.size > 1:
            model.register_forward_pre_hook(self._before, with_kwargs=True)

    @property
    def is_empty(self) -> bool:
        """Whether the user's step runs, and this replica has no sample of the batch."""
        return self._in_step and self._weight == 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Weigh means of values of a batch in this context."""
        self._in_step, self._weight = True, 1.0
        try:
            yield
        finally:
            self._in_step = False

    def weighted(self, value: Tensor) -> Tensor:
        """Return a replica's value weighted so that the mean counts each sample once, if they are known."""
        if not self._in_step or self._weight == 1.0:
            return value
        if math.isnan(self._weight):
            raise unknown_rows()
        # The mean over no samples is nan.
        return value * self._weight if self._weight else torch.zeros_like(value)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        rows = rows_of_call(args, kwargs, main_input_of(module))
        total, unknown = self.replicas.reduce(torch.tensor([rows or 0, rows is None])).tolist()
        self._weight = math.nan if unknown else (rows * self.replicas.size / total if total else 1.0)


_OVER_SAMPLES = ("mean", "avg", "sum")  # reductions over an epoch to which no samples add nothing
_LIBRARIES = ("torch", "transformers", "peft", "trl", "lightning", "pytorch_lightning")


def bind_own_methods(boosted: ModelWrapper) -> None:
    """Bind methods of the user's classes that do not call `super()` to the boosted model."""
    inner = boosted.unwrap()
    for cls in reversed(type(inner).__mro__):
        if cls is object or cls.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, method in vars(cls).items():
            own = inspect.isfunction(method) and not name.startswith("__") and not hasattr(type(boosted), name)
            if own and "__class__" not in inspect.unwrap(method).__code__.co_freevars:
                vars(boosted)[name] = MethodType(method, boosted)  # and not an attribute of the sharded model


@contextmanager
def without_model(module: LightningModule) -> Iterator[None]:
    """Take the boosted model out of a LightningModule in this context: what is left, each rank has whole."""
    taken = {name: child for name, child in module.named_children() if isinstance(child, ModelWrapper)}
    for name in taken:
        module._modules[name] = None  # keeps its place
    try:
        yield
    finally:
        module._modules.update(taken)


def connect(module: LightningModule, shares: ReplicaShares) -> None:
    """Give a LightningModule methods for its boosted model; `shares`: whether this replica has samples now."""
    module.log = partial(_log, module, shares)
    module.zero_grad = partial(_zero_grad, module)  # Trainer calls it before a validation; it reads `param.grad`
    module.toggle_optimizer = partial(_toggle_optimizer, module)
    module.untoggle_optimizer = partial(_untoggle_optimizer, module)
    module.register_state_dict_pre_hook(checks.refuse_shards)
    module.register_load_state_dict_pre_hook(checks.refuse_whole_weights)


def _log(module: LightningModule, shares: ReplicaShares, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Log a value. That of a share without samples is nan, which would make the mean over the epoch nan too."""
    if shares.is_empty and kwargs.get("reduce_fx", "mean") in _OVER_SAMPLES:
        if isinstance(value, Tensor):
            value = value.nan_to_num(nan=0.0)
        elif isinstance(value, float) and math.isnan(value):
            value = 0.0
    type(module).log(module, name, value, *args, **kwargs)


def _zero_grad(module: LightningModule, set_to_none: bool = True) -> None:
    with without_model(module):
        type(module).zero_grad(module, set_to_none)
    boosted_inside(module).zero_grad(set_to_none)


def _toggle_optimizer(module: LightningModule, optimizer: Any) -> None:
    """Let only the parameters of one optimizer require gradients: parameter groups hold pieces of them."""
    optimizers = [boosted_in(each) for each in module.trainer.optimizers]
    required = {param: param.requires_grad for each in optimizers for param in each.local_parameters}
    chosen = set(boosted_in(optimizer).local_parameters)
    for param, requires_grad in required.items():
        param.requires_grad = requires_grad and param in chosen
    module._param_requires_grad_state = required


def _untoggle_optimizer(module: LightningModule, optimizer: Any) -> None:
    for param, requires_grad in module._param_requires_grad_state.items():
        param.requires_grad = requires_grad
    module._param_requires_grad_state = {}


class NamedOptimizer(OptimizerWrapper):
    """Wrapper of a boosted optimizer with the class name of the user's, which equals that one.

    Lightning's own wrapper takes the class of what it wraps; this one hands every call on, so that it changes no state
    of the boosted optimizer's.
    """

    @staticmethod
    def of(boosted: OptimizerWrapper) -> NamedOptimizer:
        """Wrap a boosted optimizer."""
        return type(type(boosted.unwrap()).__name__, (NamedOptimizer,), {})(boosted)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.optim or other is self.optim.unwrap()

    def __hash__(self) -> int:
        return hash(self.optim)


def boosted_in(optimizer: Any) -> Any:
    """Return the boosted optimizer inside the wrappers of Trainer or Fabric."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    return optimizer.optim if isinstance(optimizer, NamedOptimizer) else optimizer


def model_attribute(module: LightningModule) -> str:
    """Return the name of the one attribute that has all weights to train, or the only weights."""
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
