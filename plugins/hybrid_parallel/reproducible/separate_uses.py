"""Tied parameters: the gradient of each use is a summand of its own.

autograd adds up the gradients of all uses of a parameter before a hook sees them, rounding the sum. If two stages of a
pipeline hold the parameter, each has the gradient of its own use. So that both are the same sum, modules that share a
parameter read it through an alias, whose gradient is given to the bucket directly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.zero.bucket_parameter import give_gradient


class _Use(torch.autograd.Function):
    """One use of a parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter) -> Tensor:
        """Return an alias of the parameter."""
        ctx.parameter = parameter
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        """Give the gradient to the parameter's bucket; leave it to autograd if it has none."""
        return None if give_gradient(ctx.parameter, grad) else grad


def one_use(parameter: Tensor) -> Tensor:
    """Return an alias of a parameter, whose gradient is a summand of its own."""
    return _Use.apply(parameter)


def separate_uses(modules: Collection[tuple[str, nn.Module]]) -> None:
    """Give modules that share a parameter aliases of it, in each of their calls that trains.

    Args:
        modules: all names of all modules of this rank's stages, with their modules.
    """
    # A module with several names is called by each of them.
    names = Counter(module for _, module in set(modules))
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in names:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders[parameter].append((module, name))
    shared: dict[nn.Module, list[str]] = defaultdict(list)
    for places in holders.values():
        if len(places) > 1 or names[places[0][0]] > 1:
            for module, name in places:
                shared[module].append(name)
    for module, own in shared.items():
        _Aliases(own).attach(module)


class _Aliases:
    """The aliases of one module's parameters during a call."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._calls: list[dict[str, nn.Parameter]] = []  # the parameters themselves, by nested calls

    def attach(self, module: nn.Module) -> None:
        """Have each call of `module` use aliases."""
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, _: Any) -> None:
        own = {name: module._parameters[name] for name in self._names}
        self._calls.append(own)
        if torch.is_grad_enabled():
            module._parameters.update({name: _Use.apply(parameter) for name, parameter in own.items()})

    def _leave(self, module: nn.Module, *_: Any) -> None:
        module._parameters.update(self._calls.pop())
