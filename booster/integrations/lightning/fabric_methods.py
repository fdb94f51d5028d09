"""The strategy's methods that Lightning's Fabric calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.lightning.inner_model import boost_inside, boosted_in, boosted_inside
from booster.integrations.lightning.job import (
    JobMethods,
    autocasts,
    check_loss,
    check_options_of_backward,
    check_precision,
)
from booster.wrappers import ModelWrapper, OptimizerWrapper


class FabricMethods(JobMethods, ParallelStrategy):
    """Strategy of a Fabric: `fabric.setup` boosts a model together with its optimizers."""

    _set_up: list[Any]  # boosted optimizers

    # ----- set-up -----

    def fabric_precision(self, given: Precision) -> Precision:
        """Return the precision of forward passes, the plugin's, or refuse another one."""
        plugin = self.booster.plugin
        check_precision(given, plugin)
        if not autocasts(given, plugin):
            return Precision()
        if plugin.mesh["pp"].size() > 1:
            raise ConfigurationError(
                f"precision={given.precision!r} converts all outputs, which a pipeline does not fetch; leave it out, "
                "and use HybridParallelPlugin(precision='bf16')"
            )
        return given

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Boost a model, or the one inside a LightningModule, together with its optimizers."""
        given = module
        module, made = boost_inside(given, optimizers, self.booster, self.shares)
        if module is not given:
            _show_instead(given, module)
        if self.booster.plugin.mesh["pp"].size() > 1:
            boosted_inside(module).register_forward_hook(lambda model, args, outputs: _unread(outputs))
        self._set_up += made
        return module, made, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Boost a model that is only evaluated."""
        return self.setup_module_and_optimizers(module, [])[0]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer by itself: it is boosted together with its model."""
        raise ConfigurationError(
            f"setup_optimizers() got a {type(optimizer).__name__} without its model; give both in one call, as in "
            "model, optimizer = fabric.setup(model, optimizer)"
        )

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: boosting puts each rank's share in its place."""

    # ----- steps -----

    def backward(
        self, tensor: Tensor | tuple[Tensor, Any], module: nn.Module | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Compute gradients of a loss, a mean or (sum, count), under any layout."""
        check_options_of_backward("fabric.backward()", args, kwargs)
        if not self._set_up:
            raise ConfigurationError(
                "fabric.backward() finds no optimizer; set it up together with its model, as in model, optimizer = "
                "fabric.setup(model, optimizer)"
            )
        check_loss(tensor, "the model that fabric.setup() returned")
        model = None if module is None else boosted_inside(module)
        own = None if model is None else next(iter(getattr(model, "optimizers", ())), None)
        self.booster.backward(tensor, own or boosted_in(self._set_up[0]))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure if there is one, with forward and backward pass, and step."""
        result = None if closure is None else closure()
        optimizer.step(**kwargs)
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the norm over all ranks to `max_norm`; return the norm before (0-d), or raise if it is not finite."""
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}; use error_if_nonfinite=False to go on")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clip each element of the gradients to ±`clip_val`."""
        optimizer.clip_grad_value_(clip_val)

    # ----- files -----

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a folder of that name, of one model, which opens under any layout; all ranks call it."""
        model, optimizers, rest = _parts(state)
        filtered = sorted(set(filter or ()) - set(rest))
        if filtered or storage_options is not None:
            given = f"filter for {filtered[0]!r}" if filtered else "storage_options"
            raise ConfigurationError(f"fabric.save() got a {given}, and a boosted model is written whole; leave it out")
        converted = self._convert_stateful_objects_in_state(rest, dict(filter or {}))
        self.checkpoint_folder.save(self.broadcast(str(path)), model, optimizers, converted)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote, under this layout or another, into the objects of `state`.

        Returns:
            What the checkpoint has besides.

        Raises:
            ConfigurationError: if it has another set of keys than `state`, and `strict`.
        """
        given = state if isinstance(state, dict) else {} if state is None else {"": state}
        model, optimizers, rest = _parts(given)
        saved = self.checkpoint_folder.rest(path, weights_only)
        self.checkpoint_folder.load(path, model, optimizers)
        missing = sorted(set(rest) - set(saved))
        if missing and strict:
            raise ConfigurationError(f"{path} has no {missing[0]!r}; it has {', '.join(sorted(saved))}")
        for name, value in rest.items():
            if name not in saved:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved.pop(name))
            else:
                given[name] = saved.pop(name)
        return saved


class NoSync(_BackwardSyncControl):
    """Fabric's `no_backward_sync` on boosted models."""

    def __init__(self, booster: Booster) -> None:
        self._booster = booster

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not communicate gradients."""
        return self._booster.no_sync(boosted_inside(module)) if enabled else nullcontext()


class UnreadOutputs:
    """Outputs of a pipeline that Fabric does not look through: it would fetch each one from the last stage.

    Args:
        outputs: outputs by name, which are fetched when they are read.
    """

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_outputs":
            raise AttributeError(name)
        return getattr(self._outputs, name)

    def __getitem__(self, key: Any) -> Any:
        return self._outputs[key]

    def __contains__(self, key: object) -> bool:
        return key in self._outputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


def _show_instead(given: nn.Module, boosted: nn.Module) -> None:
    """Let Fabric's wrapper keep the boosted model where it keeps the module that it was given.

    It finds methods such as `generate`, state dicts and attributes there. The given module is sharded in place by now:
    its own methods would work on one rank's part.
    """

    def replaced(holder: nn.Module, name: str, module: nn.Module | None) -> nn.Module | None:
        if name != "_original_module" or module is not given:
            return None
        handle.remove()
        return boosted

    handle = register_module_module_registration_hook(replaced)


def _unread(outputs: Any) -> Any:
    return UnreadOutputs(outputs) if isinstance(outputs, Mapping) else outputs


def _parts(state: Mapping[str, Any]) -> tuple[nn.Module | None, list[Any], dict[str, Any]]:
    """Return the boosted model of a state, its boosted optimizers, and the rest."""
    models = {
        name: found for name, each in state.items() if isinstance(each, nn.Module) if (found := boosted_inside(each))
    }
    optimizers = {name: each for name, each in state.items() if isinstance(each, OptimizerWrapper)}
    if len(models) > 1:
        raise ConfigurationError(
            f"a checkpoint holds one boosted model, and {' and '.join(models)} are {len(models)}; save each by itself"
        )
    rest = {name: each for name, each in state.items() if name not in models and name not in optimizers}
    model: ModelWrapper | None = next(iter(models.values()), None)
    return model, list(optimizers.values()), rest
