"""What the styles of transformers' tensor-parallel plans do to single parameters and to the edges of modules."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import copy_to_axis, reduce_from_axis
from shardformer.layers import ParallelDropout
from shardformer.layers.linear import column_spec, copies_group
from shardformer.shard_spec import Part, ShardSpec, shard_parameter

_log = logging.getLogger(__name__)
_BIASES = ("alibi", "attention_mask", "position_bias", "rel_pos", "rel_2d_pos")


def shard_own_parameter(owner: nn.Module, *, name: str, from_end: int, num_parts: int, group: ProcessGroup) -> None:
    """Cut a parameter that `owner` uses itself, such as the stacked weights of experts [experts, out, in].

    Args:
        from_end: the dim that is cut, counted from the last; vectors are cut along their only one.
        num_parts: fused parts along that dim (gate and up), each cut on its own.
    """
    parameter = getattr(owner, name)
    dim = max(parameter.dim() - from_end, 0)
    size = parameter.shape[dim]
    parts = (Part(size // num_parts),) * (num_parts if parameter.dim() > 1 else 1)
    if parameter.dim() == 1:
        parts = (Part(size),)
    spec = ShardSpec(tuple(parameter.shape), dim, parts, dist.get_rank(group), dist.get_world_size(group))
    setattr(owner, name, shard_parameter(parameter, spec))


def shard_weights_of_heads(owner: nn.Module, *, name: str, group: ProcessGroup) -> None:
    """Cut the parameters [heads, head_dim] of a module of `owner`; heads fewer than ranks are copied."""
    module = getattr(owner, name)
    for each, parameter in list(module.named_parameters(recurse=False)):
        heads = column_spec(parameter.shape[0], group, num_heads=parameter.shape[0])
        spec = replace(heads, full_shape=tuple(parameter.shape))
        setattr(module, each, shard_parameter(parameter, spec, copies_group(group, heads.copies)))


def share_expert_inputs(experts: nn.Module, group: ProcessGroup) -> None:
    """Every rank has a part of each expert: hidden states [tokens, hidden] and routing weights are read by all of them,
    and what they find is summed."""

    _share_inputs(experts, group, first=0)
    reduce_output(experts, group)
    _avoid_unaligned_kernel(experts, dist.get_world_size(group))


def _avoid_unaligned_kernel(experts: nn.Module, world_size: int) -> None:
    """The grouped matrix product wants rows of whole 16 bytes; a rank's part of an odd size runs expert by expert."""
    stacked = [parameter for parameter in experts.parameters() if parameter.dim() == 3]
    sizes = [size // world_size * parameter.element_size() for parameter in stacked for size in parameter.shape[1:]]
    if all(size % 16 == 0 for size in sizes) or getattr(experts, "config", None) is None:
        return
    _log.warning(
        "the local part of %s is not aligned to 16 bytes: its experts run one by one; an intermediate size that "
        "%d ranks divide into multiples of 16 bytes is faster",
        type(experts).__name__,
        world_size,
    )
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = "eager"


def reduce_shared_experts(module: nn.Module, group: ProcessGroup) -> None:
    """Every rank has a part of the module: its output is summed, and so are the gradients of what it reads.

    Layers below it sum those of their input by themselves, where there are any.
    """
    _share_inputs(module, group, first=0 if any(True for _ in module.parameters(recurse=False)) else 1)
    reduce_output(module, group)


def _share_inputs(module: nn.Module, group: ProcessGroup, first: int) -> None:
    """The ranks read the same inputs, from number `first` on, and each finds a part of their gradients."""

    def share(x: Any) -> Any:
        return copy_to_axis(x, group) if _is_differentiable(x) else x

    def read(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        shared = tuple(share(x) for x in args[first:])
        return (*args[:first], *shared), {name: share(x) for name, x in kwargs.items()}

    module.register_forward_pre_hook(read, with_kwargs=True)


def reduce_output(module: nn.Module, group: ProcessGroup) -> None:
    """The output is a partial sum; the whole is the sum over ranks."""
    # A copy, because the reduction works in place and the module may have returned a view.
    module.register_forward_hook(lambda _, __, output: reduce_from_axis(output.clone(), group))


def scale_input(module: nn.Module, group: ProcessGroup) -> None:
    """The output is summed over ranks that all find the same: divide by their number first."""
    size = dist.get_world_size(group)
    module.register_forward_pre_hook(lambda _, args: (args[0] / size, *args[1:]))


def sum_gradient_of_rotary_part(module: nn.Module, size: int, group: ProcessGroup) -> None:
    """The compressed key/value projection of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Its last features are the rotary key, which every head reads, so that a rank's gradient of them is partial; the
    others go into a column-parallel layer, which sums their gradient itself.

    Args:
        size: features of the rotary key.
    """

    def split(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        compressed, rotary_key = output.split([output.shape[-1] - size, size], dim=-1)
        return torch.cat([compressed, copy_to_axis(rotary_key, group)], dim=-1)

    module.register_forward_hook(split)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def use_local_biases(attention: nn.Module, heads: int, group: ProcessGroup) -> None:
    """Let `attention` take this rank's heads of what it is given for all: ALiBi, and a mask that biases were added to.

    Args:
        heads: of the whole model; they are a dim of [heads or batch * heads, 1, seq] or [batch, heads, seq or 1, seq].
    """
    local_heads = heads // dist.get_world_size(group)
    first = dist.get_rank(group) * local_heads

    def local(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 3 and value.shape[0] % heads == 0:
            return value.unflatten(0, (-1, heads))[:, first : first + local_heads].flatten(0, 1)
        if value.dim() == 4 and value.shape[1] == heads:
            return value[:, first : first + local_heads]
        return value

    def take(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {name: local(value) if name in _BIASES else value for name, value in kwargs.items()}

    attention.register_forward_pre_hook(take, with_kwargs=True)


def drop_behind_activation(layer: nn.Module, rank: int) -> None:
    """A dropout between two linear layers that is a function acts on features that each rank has to itself: put it into
    the activation, as a module that draws for this rank."""
    probability, layer.activation_dropout = layer.activation_dropout, 0.0
    if probability:
        layer.activation_fn = nn.Sequential(layer.activation_fn, ParallelDropout(probability, rank))
