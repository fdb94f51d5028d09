"""Wrappers that `boost` returns for a model and an optimizer; they forward attributes to the wrapped object."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# What DeepSpeed or ColossalAI calls on a model or an optimizer -> what to write.
_INSTEAD = {
    **dict.fromkeys(("clip_grad_norm", "clip_grad_by_norm"), "model.clip_grad_norm_(1.0), or max_norm=1.0 of a plugin"),
    "backward": "booster.backward(loss, optimizer)",
    "step": "optimizer.step()",
    "save_checkpoint": "booster.save_checkpoint(directory, model=model, optimizer=optimizer)",
    "load_checkpoint": "booster.load_checkpoint(directory, model=model, optimizer=optimizer)",
}


def _of_inside(inside: Any, name: str) -> Any:
    """Return an attribute of what a wrapper holds."""
    if name in _INSTEAD and not hasattr(inside, name):
        raise AttributeError(f"a boosted {type(inside).__name__} has no {name}; use {_INSTEAD[name]}")
    return getattr(inside, name)


class ModelWrapper(nn.Module):
    """A boosted model. Missing attributes are looked up in the wrapped model.

    Args:
        module: the wrapped model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self) -> nn.Module:
        """Return the wrapped model."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return _of_inside(super().__getattr__("module"), name)


class OptimizerWrapper(torch.optim.Optimizer):
    """A boosted optimizer. `param_groups`, `state` and `defaults` are the wrapped optimizer's own objects."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:  # no super().__init__: the inner one holds the state
        self.optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer, by parameter."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of the wrapped optimizer's parameter groups."""
        return self.optim.defaults

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the user's optimizer."""
        return self.optim

    def step(self, closure: Any = None) -> Any:
        """Update the parameters; return the loss that `closure` returns, if it is given."""
        return self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters: to None or, if not `set_to_none`, to zero."""
        self.optim.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise a RuntimeError: parameters are sharded by `boost()`."""
        raise RuntimeError("parameter groups cannot be added after boost(); add them to the optimizer before it")

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return _of_inside(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
