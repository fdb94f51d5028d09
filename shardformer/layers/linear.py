"""Column- and row-parallel linear layers (Megatron-LM, arXiv 1909.08053, section 3).

A column-parallel layer cuts the output features, a row-parallel layer the input features, so that a pair of them
needs one all-reduce forward and one backward. `nn.Linear` and GPT-2's `Conv1D` (weight stored `[in, out]`) are both
taken; parameters keep the layout that they have in the native layer, so that a checkpoint needs no conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardformer.collectives import copy_to_axis, gather_from_axis, reduce_from_axis, split_to_axis
from shardformer.layers.parallel_module import ParallelModule
from shardformer.sequence import PendingGather, SequenceParallel
from shardformer.shard_spec import Part, ShardSpec, annotate, pad_to_multiple, shard_parameter


class ColumnParallelLinear(ParallelModule):
    """A linear layer whose output features are cut over the tensor-parallel axis.

    Input: [..., in_features], the same on every rank. Output: [..., local out_features]; with `gather_output` the
    whole [..., out_features] on every rank.

    Args:
        weight: local weight, [local out, in], or [in, local out] when `transposed`.
        bias: local bias [local out] or None.
        group: process group of the axis.
        transposed: the weight is stored as in `Conv1D`.
        gather_output: all-gather the output features.
        input_is_gathered: the input comes from a sequence-parallel gather, which already sums its gradient.
    """

    cuts_layer = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: ProcessGroup,
        *,
        transposed: bool = False,
        gather_output: bool = False,
        input_is_gathered: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group = group
        self.transposed, self.gather_output, self.input_is_gathered = (transposed, gather_output, input_is_gathered)
        self.adds_bias = True  # False where an activation behind it does
        self.full_out_features = weight.shard_spec.full_shape[1 if transposed else 0]
        self._shared_input: SharedInput | None = None

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: ProcessGroup,
        *,
        num_heads: int | None = None,
        part_size: int | None = None,
        parts: tuple[Part, ...] | None = None,
        divisible_by: int | None = None,
        **kwargs: Any,
    ) -> ColumnParallelLinear:
        """Share out a native linear layer.

        Args:
            num_heads: attention heads in each part; a head is never cut, and heads fewer than ranks are copied.
            part_size: features of each part of a fused projection (query, key, value), each part cut on its own.
            parts: the parts of a fused projection, where they differ in size.
            divisible_by: pad the output features to a multiple of this times the number of ranks (vocabularies).

        Raises:
            TypeError: `module` is not a linear layer.
            ValueError: the output of a fused projection, or of heads, is to be gathered.
        """
        transposed = is_transposed(module)
        weight_dim = 1 if transposed else 0
        out_features = module.weight.shape[weight_dim]
        rank, world_size = (dist.get_rank(process_group), dist.get_world_size(process_group))
        part_size = part_size or out_features
        if kwargs.get("gather_output"):
            if num_heads is not None or part_size != out_features:
                raise ValueError("gather_output=True cannot put fused parts or heads together; use gather_output=False")
            divisible_by = divisible_by or 1  # an all-gather needs equal shards
        padded = pad_to_multiple(part_size, divisible_by * world_size) if divisible_by else None
        unit, copies = 1, 1
        if num_heads is not None:
            unit, copies = part_size // num_heads, max(1, world_size // num_heads)
        parts = parts or tuple(Part(part_size, unit, padded) for _ in range(out_features // part_size))
        grad_group = copies_group(process_group, copies)

        def share(parameter: nn.Parameter, dim: int) -> nn.Parameter:
            spec = ShardSpec(tuple(parameter.shape), dim, parts, rank, world_size, copies)
            return shard_parameter(parameter, spec, grad_group)

        weight = share(module.weight, weight_dim)
        bias = None if module.bias is None else share(module.bias, 0)
        return ColumnParallelLinear(weight, bias, process_group, transposed=transposed, **kwargs)

    @property
    def matrix(self) -> Tensor:
        """The local weight as [local out, in]."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self._shared_input(self, x) if self._shared_input is not None else self.project(x)
        if not self.gather_output:
            return out
        return gather_from_axis(out, out.dim() - 1, self.group)[..., : self.full_out_features]

    def project(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., local out]."""
        return _project(x, [self])[0]

    @property
    def added_bias(self) -> Tensor | None:
        return self.bias if self.adds_bias else None

    def extra_repr(self) -> str:
        return f"full_out_features={self.full_out_features}, local_weight={tuple(self.weight.shape)}"


class RowParallelLinear(ParallelModule):
    """A linear layer whose input features are cut over the tensor-parallel axis.

    Input: [..., local in_features]. Output: the sum over ranks, [..., out_features], on every rank; in a
    sequence-parallel region this rank's slice of the sequence of it. The bias is added once, after the sum.

    Args:
        weight: local weight, [out, local in], or [local in, out] when `transposed`.
        bias: whole bias [out] or None.
        group: process group of the axis.
        transposed: the weight is stored as in `Conv1D`.
        sequence: the sequence-parallel region that the output enters, or None.
        splits_input: the input is whole on every rank; each reads its features of it.
    """

    cuts_layer = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: ProcessGroup,
        *,
        transposed: bool = False,
        sequence: SequenceParallel | None = None,
        splits_input: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.transposed, self.sequence = group, transposed, sequence
        self.splits_input, self.adds_bias = splits_input, True

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: ProcessGroup,
        *,
        num_heads: int | None = None,
        sequence: SequenceParallel | None = None,
        splits_input: bool = False,
    ) -> RowParallelLinear:
        """Share out a native linear layer; `num_heads` attention heads along the input are never cut."""
        transposed = is_transposed(module)
        weight_dim = 0 if transposed else 1
        in_features = module.weight.shape[weight_dim]
        rank, world_size = (dist.get_rank(process_group), dist.get_world_size(process_group))
        part = Part(in_features, in_features // num_heads if num_heads else 1)
        spec = ShardSpec(tuple(module.weight.shape), weight_dim, (part,), rank, world_size)
        weight = shard_parameter(module.weight, spec)
        bias = module.bias
        if bias is not None:
            # Under sequence parallelism the bias meets this rank's tokens only: its gradient is a partial sum.
            bias = nn.Parameter(bias.data, requires_grad=bias.requires_grad)
            replicated = ShardSpec(tuple(bias.shape), rank=rank, world_size=world_size)
            annotate(bias, replicated, process_group if sequence is not None else None)
        return RowParallelLinear(
            weight, bias, process_group, transposed=transposed, sequence=sequence, splits_input=splits_input
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.splits_input:
            start, stop, _ = self.weight.shard_spec.pieces()[0]
            x = split_to_axis(x, start, stop, self.group)
        out = F.linear(x, self.weight.t() if self.transposed else self.weight)
        out = reduce_from_axis(out, self.group) if self.sequence is None else self.sequence.reduce_scatter(out)
        return out if self.bias is None or not self.adds_bias else out + self.bias

    def extra_repr(self) -> str:
        return f"full_shape={self.weight.shard_spec.full_shape}, local_weight={tuple(self.weight.shape)}"


class HeadRowsLinear(ParallelModule):
    """A fused projection [query heads, keys, values] with fewer key/value heads than ranks.

    Input: [..., in_features], the same on every rank. Output: [..., (local query heads + 2) * head_dim]. The weight
    stays whole on every rank, which computes with the rows of its query heads and of the key and value that they
    share: its gradient is a partial sum.
    """

    cuts_layer = True

    def __init__(
        self,
        native: nn.Linear,
        group: ProcessGroup,
        sizes: tuple[int, int, int],
        input_is_gathered: bool,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.group = native.weight, native.bias, group
        self.input_is_gathered = input_is_gathered
        num_heads, num_groups, head_dim = sizes
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group))
        local = num_heads // world_size
        kv_head = rank * num_groups // world_size
        starts = (rank * local, num_heads + kv_head, num_heads + num_groups + kv_head)
        counts = (local, 1, 1)
        self.rows = [
            slice(start * head_dim, (start + count) * head_dim) for start, count in zip(starts, counts, strict=True)
        ]
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                annotate(parameter, ShardSpec(tuple(parameter.shape), rank=rank, world_size=world_size), group)

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: ProcessGroup,
        *,
        num_heads: int,
        num_groups: int = 1,
        head_dim: int,
        input_is_gathered: bool = False,
    ) -> HeadRowsLinear:
        """Take over a fused projection of `num_heads` query and `num_groups` key and value heads of `head_dim`."""
        return HeadRowsLinear(module, process_group, (num_heads, num_groups, head_dim), input_is_gathered)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.weight[rows] for rows in self.rows])
        bias = None if self.bias is None else torch.cat([self.bias[rows] for rows in self.rows])
        pending = PendingGather.of(x)
        if pending is not None:  # no overlap for this rare layer
            x = pending.region.gather(pending.local)
        return F.linear(x if self.input_is_gathered else copy_to_axis(x, self.group), weight, bias)


class SharedInput:
    """Column-parallel layers that read the same input (query, key, value) run as one autograd node.

    Their input gradients are summed locally first, so that one all-reduce serves them all, and it runs while the
    weight gradients are computed. A layer called with an input of its own (cross-attention) runs by itself.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = tuple(layers)
        self._key: tuple[int, int, bool] | None = None
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for layer in self.layers:
            layer._shared_input = self

    def __call__(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        # The values of a gather that is on its way are written later, which counts as a new version.
        version = x._version if PendingGather.of(x) is None else -1
        key = (id(x), version, torch.is_grad_enabled())
        if self._key != key or id(layer) not in self._outputs:
            if layer is not self.layers[0]:
                return layer.project(x)
            outputs = _project(x, self.layers)
            # The input is kept alive while outputs wait, so that its id cannot be reused.
            self._key, self._input = key, x
            self._outputs = {id(each): out for each, out in zip(self.layers, outputs, strict=True)}
        out = self._outputs.pop(id(layer))
        if not self._outputs:
            self._key = self._input = None
        return out


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored [in, out].

    Raises:
        TypeError: the module is neither `nn.Linear` nor `Conv1D`.
    """
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D":
        return True
    raise TypeError(f"{type(module).__name__} is not a linear layer; name an nn.Linear or a Conv1D in the policy")


def copies_group(group: ProcessGroup, copies: int) -> ProcessGroup | None:
    """The `copies` neighbouring ranks of `group` that hold the same key/value heads; None when there is one each."""
    if copies == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    if copies == len(ranks):
        return group
    start = dist.get_rank(group) // copies * copies
    key = tuple(ranks[start : start + copies])
    if key not in _COPIES_GROUPS:
        # Local synchronisation: only the members take part, so no rank outside this group has to know of it.
        _COPIES_GROUPS[key] = dist.new_group(list(key), use_local_synchronization=True)
    return _COPIES_GROUPS[key]


_COPIES_GROUPS: dict[tuple[int, ...], ProcessGroup] = {}


def _project(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> Sequence[Tensor]:
    """[..., in] -> [..., local out] of each layer; all of them read `x`."""
    weights = [layer.matrix for layer in layers]
    biases = [layer.added_bias for layer in layers]
    pending = PendingGather.of(x)
    if pending is not None:
        return _GatheredLinear.apply(pending.local, pending, len(layers), *weights, *biases)
    if layers[0].input_is_gathered:
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return _ColumnLinear.apply(x, layers[0].group, len(layers), *weights, *biases)


class _GatheredLinear(torch.autograd.Function):
    """y_i = gather(x) W_i^T + b_i for several i, with the communication behind the products (sequence overlap).

    Forward, the rank's own tokens are multiplied while those of the others arrive; backward, the gradient of the
    input is reduced and scattered while the gradients of the weights are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, pending: PendingGather, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        own = [F.linear(pending.own, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        gathered = pending.wait()  # [seq, batch, in]
        outputs = []
        for weight, bias, part in zip(weights, biases, own, strict=True):
            out = part.new_empty((*gathered.shape[:-1], part.shape[-1]))
            out[pending.rows] = part
            for rows in pending.other_rows:
                out[rows] = F.linear(gathered[rows], weight, bias)
            outputs.append(out.movedim(0, 1)[:, : pending.length].contiguous())
        ctx.pending_region, ctx.length, ctx.count = pending.region, pending.length, count
        ctx.save_for_backward(gathered, *weights)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        region, needs = ctx.pending_region, ctx.needs_input_grad
        grad_x, work = None, None
        if needs[0]:
            whole = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))  # [batch, seq, in]
            grad_x, work = region.start_reduce_scatter(whole)
        flat_x = _matrix(gathered[: ctx.length].movedim(0, 1))
        flat = [_matrix(grad) for grad in grads]
        needs_weights, needs_biases = needs[3 : 3 + ctx.count], needs[3 + ctx.count :]
        grad_weights = [grad.t() @ flat_x if need else None for grad, need in zip(flat, needs_weights, strict=True)]
        grad_biases = [grad.sum(0) if need else None for grad, need in zip(flat, needs_biases, strict=True)]
        if work is not None:
            work.wait()
            grad_x = grad_x.movedim(0, 1).contiguous()
        return grad_x, None, None, *grad_weights, *grad_biases


class _ColumnLinear(torch.autograd.Function):
    """y_i = x W_i^T + b_i for several i; `f` is part of it: the gradient of x is summed over the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        ctx.group, ctx.count = group, count
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [_matrix(grad) for grad in grads]  # [tokens, local out]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        # The weight gradients fill the time that the all-reduce takes.
        needs = ctx.needs_input_grad[3:]
        flat_x = _matrix(x)  # [tokens, in]
        grad_weights = [
            grad.t() @ flat_x if need else None for grad, need in zip(flat, needs[: ctx.count], strict=True)
        ]
        grad_biases = [grad.sum(0) if need else None for grad, need in zip(flat, needs[ctx.count :], strict=True)]
        if work is not None:
            work.wait()
            grad_x = grad_x.view_as(x)
        return grad_x, None, None, *grad_weights, *grad_biases


def _matrix(x: Tensor) -> Tensor:
    """[..., features] -> [tokens, features], also where a rank's piece has no features at all."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
