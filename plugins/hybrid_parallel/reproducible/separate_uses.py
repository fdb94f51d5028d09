"""Tied parameters: the gradient of each use is a summand of its own.

autograd adds up the gradients of all uses of a parameter before a hook sees them, rounding the sum. If two stages of a
pipeline hold the parameter, each has the gradient of its own use. So that both are the same sum, modules that share a
parameter read it through an alias, whose gradient is given to the bucket directly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.zero.bucket_parameter import give_gradient
from shardformer.utils.parameter_aliases import alias_parameters


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
        alias_parameters(module, partial(_aliases_of, own))


def _aliases_of(names: Sequence[str], module: nn.Module, _: tuple[Any, ...]) -> dict[str, Tensor]:
    if not torch.is_grad_enabled():
        return {}
    parameters = {name: module._parameters[name] for name in names}
    # Others have been replaced by aliases.
    return {name: one_use(each) for name, each in parameters.items() if isinstance(each, nn.Parameter)}
