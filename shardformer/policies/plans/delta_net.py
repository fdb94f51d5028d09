"""Heads of gated delta nets (arXiv 2412.06464; Qwen3-Next, Qwen3.5), which tensor parallelism divides.

Plans of transformers gather the outputs of the projections, so that every rank computes all heads. So it is here where
`tp_size` does not divide the heads, and with `reproducible=True`, whose blocks the delta rule does not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import blocks_of
from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.policies.base import SubModuleReplacementDescription
from shardformer.policies.module_edits import shard_own_parameter
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part, ShardSpec, shard_parameter
from shardformer.utils.module_paths import join, starred

STYLE = "delta_net"
_COUNTS = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
_OF_HEADS = {"A_log", "dt_bias"}
_BEHIND = {"conv1d", "norm", "out_proj"}
# Of key heads: their query, key, values and gates together; or the parts of all heads one behind the other.
_GROUPED = {"in_proj_qkvz", "in_proj_ba"}
_APART = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}


def delta_net_styles(model: nn.Module) -> dict[str, str]:
    """Return the style of each part of gated delta nets, by its path with `*` for numbers."""
    return {
        starred(join(path, name)): STYLE
        for path, module in model.named_modules()
        if _is_delta_net(module)
        for name in (*module._modules, *module._parameters)
    }


def local_counts(owner: nn.Module, config: ShardConfig) -> dict[str, int]:
    """Return a rank's counts of heads and features in a gated delta net; empty if it has all, or for another module."""
    size = config.tensor_parallel_size
    return {name: getattr(owner, name) // size for name in _COUNTS} if _divides(owner, config) else {}


def change_of(owner: nn.Module, name: str, config: ShardConfig) -> SubModuleReplacementDescription | Callable | None:
    """Return how a part of a gated delta net is sharded; None if every rank has all of it."""
    is_linear = isinstance(getattr(owner, name), nn.Linear)
    if not _divides(owner, config):
        gathered = SubModuleReplacementDescription(name, ColumnParallelLinear, {"gather_output": True}, reads=name)
        return gathered if is_linear else None
    if name == "out_proj":
        return SubModuleReplacementDescription(name, RowParallelLinear, {"num_heads": owner.num_v_heads})
    if is_linear:
        options = {"parts": _channels(owner)} if name == "in_proj_qkv" else {"num_heads": _heads(owner, name)}
        return SubModuleReplacementDescription(name, ColumnParallelLinear, options, reads="hidden_states")
    if name == "conv1d":
        return partial(_cut_channels, parts=_channels(owner), group=config.group)
    if name in _OF_HEADS:
        return partial(shard_own_parameter, name=name, from_end=1, num_parts=1, group=config.group)
    return SubModuleReplacementDescription(name, None, partial_gradient=True)  # the norm of each head


def _is_delta_net(module: nn.Module) -> bool:
    inputs = module._modules.keys() - _BEHIND
    is_known = inputs in (_GROUPED, _APART) and module._modules.keys() >= _BEHIND
    return is_known and module._parameters.keys() == _OF_HEADS and all(hasattr(module, name) for name in _COUNTS)


def _divides(owner: nn.Module, config: ShardConfig) -> bool:
    size = config.tensor_parallel_size
    if size == 1 or not _is_delta_net(owner) or blocks_of(config.group) is not None:
        return False
    return owner.num_k_heads % size == owner.num_v_heads % size == 0


def _heads(owner: nn.Module, name: str) -> int:
    return owner.num_k_heads if name in _GROUPED else owner.num_v_heads


def _channels(owner: nn.Module) -> tuple[Part, ...]:
    """Return queries, keys and values, as the convolution has them."""
    return Part(owner.key_dim), Part(owner.key_dim), Part(owner.value_dim)


def _cut_channels(owner: nn.Module, *, parts: tuple[Part, ...], group: ProcessGroup) -> None:
    """Shard the convolution, whose channels are apart from each other, [channels, 1, kernel]."""
    conv = owner.conv1d
    for name, parameter in list(conv.named_parameters()):
        spec = ShardSpec(tuple(parameter.shape), 0, parts, dist.get_rank(group), dist.get_world_size(group))
        setattr(conv, name, shard_parameter(parameter, spec))
    conv.groups = conv.in_channels = conv.out_channels = conv.weight.shape[0]
