"""ParallelModule: base class of layers that hold one rank's shard of a native layer's weights.

Sums of partial gradients in the backward pass, for a sharded model in a plain torch training loop.

A parameter that is whole, or replicated, on ranks that each use it on a part of the data (norms of heads, key/value
heads fewer than ranks) gets a partial gradient on each rank. Code that reduces gradients itself gets the ranks from
`grad_group_of` and switches these sums off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from shardformer.matmul.quantised import is_quantised
from shardformer.shard_spec import grad_group_of


class ParallelModule(nn.Module, ABC):
    """Base class of the layers that replace native ones. Parameters are local tensors that carry a `ShardSpec`.

    Attributes:
        needs_axis: whether the replacement only makes sense on a tensor-parallel axis of several ranks.
        shards_layer: whether it shards weights of a layer that stay whole when ranks exchange heads instead.
        can_stay_whole: whether the native layer, whole on every rank, can be kept instead of the replacement.
        takes_kernels: whether its weight may be quantised.
    """

    needs_axis = True
    shards_layer = False
    can_stay_whole = False
    takes_kernels = False

    @staticmethod
    @abstractmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> ParallelModule:
        """Build this rank's shard of `module`.

        Args:
            module: the native layer, whole, on this rank.
            process_group: the tensor-parallel group.
            kwargs: options of the layer class.

        Raises:
            TypeError: this class cannot shard modules of this kind.
        """

    @staticmethod
    def keep_whole(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> None:
        """Keep `module` whole, but give its neighbors the same inputs and outputs as the replacement would.

        The default does nothing, which is right if inputs and outputs of the replacement are whole on every rank.

        Args:
            module: the native layer, whole, on this rank.
            process_group: the tensor-parallel group.
            kwargs: options of the layer class.

        Raises:
            TypeError: the number of features that the module reads or returns cannot be determined.
        """


def sum_partial_gradients(model: nn.Module) -> None:
    """Let every backward pass sum the partial gradients of `model`; skips parameters on the meta device for now."""
    for parameter in model.parameters():
        group = grad_group_of(parameter)
        if group is None or parameter.is_meta or is_quantised(parameter):
            continue
        if not hasattr(parameter, "partial_sum"):
            parameter.partial_sum = hook_gradient(parameter, partial(_summed, group))


def defer_partial_sums(model: nn.Module) -> None:
    """Switch the sums off, because other code sums the gradients."""
    for parameter in model.parameters():
        handle = vars(parameter).pop("partial_sum", None)
        if handle is not None:
            handle.remove()


def hook_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register `hook` on the gradient of a parameter, even if it is frozen; return the handle."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_hook(hook)
    parameter.requires_grad_(trains)
    return handle


def _summed(group: ProcessGroup, gradient: Tensor) -> Tensor:
    # Copy: the same memory may also be the gradient of another tensor.
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
