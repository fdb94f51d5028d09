"""Sums of gradients in the backward pass itself, for a sharded model whose loop is plain torch.

A parameter that is whole, or copied, on ranks that each see a part of what it is used for (norms of heads, key/value
heads fewer than ranks) gets a partial gradient on each of them. Whoever reduces gradients by himself asks
`grad_group_of` for the ranks and switches these sums off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from shardformer.shard_spec import grad_group_of


def sum_in_backward(model: nn.Module) -> None:
    """Let every backward pass sum the partial gradients of `model`; those on the meta device wait for their values."""
    for parameter in model.parameters():
        group = grad_group_of(parameter)
        if group is not None and not parameter.is_meta and not hasattr(parameter, "partial_sum"):
            parameter.partial_sum = hook_gradient(parameter, partial(_summed, group))


def leave_sums(model: nn.Module) -> None:
    """Switch the sums off: somebody else sums the gradients."""
    for parameter in model.parameters():
        handle = vars(parameter).pop("partial_sum", None)
        if handle is not None:
            handle.remove()


def hook_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """`parameter.register_hook(hook)`, also while the parameter is frozen; returns the handle."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_hook(hook)
    parameter.requires_grad_(trains)
    return handle


def _summed(group: ProcessGroup, gradient: Tensor) -> Tensor:
    # A copy: the same memory may be the gradient of something else, too.
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
