"""Parts of Mamba-2 (arXiv 2405.21060, section 7) whose heads are sharded over ranks, all of which read one B and C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from shardformer.distributed.collectives import all_gather, copy_to_region, reduce_from_region
from shardformer.layers.linear import ColumnParallelLinear, column_spec, out_features
from shardformer.layers.parallel_module import ParallelModule
from shardformer.shard_spec import Part, ShardSpec, shard_parameter
from shardformer.utils.untraced import call_through


class StateSpaceProjection(ColumnParallelLinear):
    """Column-parallel projection to [gate, channels, B and C, time steps], whose third part every rank gets whole."""

    takes_kernels = False

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: ProcessGroup, *, parts: tuple[Part, ...]
    ) -> ColumnParallelLinear:
        """Shard a native projection whose output has `parts`, four of them."""
        gather = _gathers_third(module, parts, process_group)

        def whole_matrices(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            return gather(output)

        whole_matrices.sees_adapters = True  # an adapter's output has the same parts
        module.register_forward_hook(whole_matrices)  # a replacement takes over the hooks of the native module
        return ColumnParallelLinear.from_native_module(module, process_group, parts=parts)

    @staticmethod
    def keep_whole(module: nn.Module, process_group: ProcessGroup, *, parts: tuple[Part, ...]) -> None:
        """Prepare a projection whose weight stays whole on every rank."""
        gather = _gathers_third(module, parts, process_group)
        ColumnParallelLinear.keep_whole(module, process_group, parts=parts)
        call_through(module, lambda call, args, kwargs: gather(call(*args, **kwargs)))


def _gathers_third(module: nn.Module, parts: tuple[Part, ...], group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return what makes the third part of the local output [..., features] whole."""
    pieces = column_spec(out_features(module), group, parts=parts).pieces()
    sizes = [stop - start for start, stop, _ in pieces]

    def gather(output: Tensor) -> Tensor:
        gate, channels, matrices, steps = output.split(sizes, dim=-1)
        return torch.cat([gate, channels, all_gather(matrices, output.dim() - 1, group), steps], dim=-1)

    return gather


class GatedRMSNorm(ParallelModule):
    """RMS norm over the features of all ranks, with a gate.

    Input and gate: [..., local features]; ranks exchange one sum of squares per token, [..., 1].

    Args:
        native: a gated norm of one group, with a weight [features].
        group: the tensor-parallel group.
    """

    shards_layer = True

    def __init__(self, native: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        (size,) = native.weight.shape
        spec = ShardSpec((size,), 0, (Part(size),), dist.get_rank(group), dist.get_world_size(group))
        self.weight, self.group, self.full_features = shard_parameter(native.weight, spec), group, size
        self.variance_epsilon = native.variance_epsilon
        # That of Falcon-H1 knows both orders, and rounds last.
        self.gates_last = getattr(native, "norm_before_gate", False)
        self.rounds_last = hasattr(native, "norm_before_gate")

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup, **_: Any) -> GatedRMSNorm:
        """Shard the weight of a gated norm of transformers."""
        return GatedRMSNorm(module, process_group)

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize [..., local features] in fp32, and multiply it by `gate`; returns the dtype of the input."""
        x, dtype = hidden_states.to(torch.float32), hidden_states.dtype
        factor = 1.0 if gate is None else F.silu(gate.to(torch.float32))
        if not self.gates_last:
            x = x * factor
        squares = reduce_from_region(x.pow(2).sum(-1, keepdim=True), self.group)
        # Each rank normalizes its own features with the sum over all, so that its gradient of the sum is partial.
        variance = copy_to_region(squares, self.group) / self.full_features
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        x = self.weight * (x if self.rounds_last else x.to(dtype))
        if self.gates_last:
            x = x * factor
        return x.to(dtype) if self.rounds_last else x
