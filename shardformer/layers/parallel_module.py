"""ParallelModule, the base class of layers that hold one rank's shard of weights, and the layers with whole weights.

`Linear`, `Conv1D` and `Embedding` replace those of torch and transformers: products may run in FP8, and gradients of
weights may be deferred, or written directly to gradient buffers (`matmul/kernel.py`).

In a plain torch training loop, `sum_partial_gradients` sums the gradients of a sharded model. A parameter that is
whole, or replicated, on ranks that each use it on a part of the data (norms of heads, key/value heads fewer than ranks)
gets a partial gradient on each rank. Code that reduces gradients itself gets the ranks from `grad_group_of`, and
switches these sums off.
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

from shardformer.matmul.kernel import WeightGradStore, embedding, has_grad_buffer, linear
from shardformer.matmul.native import MatmulLayer
from shardformer.matmul.quantised import is_quantised
from shardformer.shard_spec import grad_group_of
from shardformer.utils.derived_modules import derive, replace_modules


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


class Linear(MatmulLayer, nn.Linear):
    """`nn.Linear` with the same state.

    Attributes:
        adds_bias: False if a following activation adds the bias.
    """

    adds_bias = True

    def forward(self, input: Tensor) -> Tensor:
        """Compute what the native layer computes, with its kernel."""
        bias = self.bias if self.adds_bias else None
        return linear(input, self.weight, bias, self.kernel, self.weight_grad_store)


class Conv1D(MatmulLayer, nn.Module):
    """`Conv1D` of transformers, whose weight is [in, out], with the same state; `adds_bias` as in `Linear`."""

    adds_bias = True

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the native layer computes, with its kernel."""
        bias = self.bias if self.adds_bias else None
        return linear(x, self.weight.t(), bias, self.kernel, self.weight_grad_store)


class Embedding(nn.Embedding):
    """`nn.Embedding` with the same state."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows `input` of the weight; the gradient may go to an attached buffer."""
        return embedding(input, self.weight, self.padding_idx)


def replicated_linear(module: nn.Module) -> nn.Module | None:
    """Return a `Linear` or `Conv1D` with `module`'s state, or itself; None unless it is a plain linear layer."""
    if "forward" in vars(module) or is_quantised(module._parameters.get("weight")):
        return None
    if isinstance(module, Linear | Conv1D):
        return module
    if type(module).forward is nn.Linear.forward:
        return derive(module, Linear)
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    return derive(module, Conv1D) if is_conv1d else None


def replace_native_layers(model: nn.Module, with_buffers: bool = False) -> None:
    """Replace layers below `model` by those of this file; `with_buffers`: only where a gradient's buffer waits."""
    chosen = (each for each in model.modules() if not with_buffers or has_grad_buffer(each._parameters.get("weight")))
    found = {module: replicated_linear(module) or _replicated_embedding(module) for module in chosen}
    replace_modules(model, {module: new for module, new in found.items() if new is not None and new is not module})


def defer_weight_grads(model: nn.Module, store: WeightGradStore) -> None:
    """Let `store` defer the weight gradients of the linear layers of `model`."""
    replace_native_layers(model)
    for module in model.modules():
        if isinstance(module, MatmulLayer):
            module.weight_grad_store = store


def _replicated_embedding(module: nn.Module) -> nn.Module | None:
    if type(module).forward is not nn.Embedding.forward or "forward" in vars(module):
        return None
    return None if module.max_norm or module.scale_grad_by_freq or module.sparse else derive(module, Embedding)
