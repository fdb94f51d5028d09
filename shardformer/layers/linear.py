"""Column- and row-parallel linear layers (Megatron-LM, arXiv 1909.08053, section 3).

A column-parallel layer shards the output features, a row-parallel layer the input features, so that a pair of them
needs one all-reduce forward and one backward. Both `nn.Linear` and GPT-2's `Conv1D` (weight stored `[in, out]`) are
accepted. Parameters keep the layout of the native layer, so that a checkpoint needs no conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import num_parts
from shardformer.distributed.collectives import (
    all_gather,
    copy_to_region,
    gather_features,
    gather_from_region,
    reduce_from_region,
    split_features,
)
from shardformer.distributed.process_groups import LOCAL, ProcessGroups, new_group
from shardformer.distributed.sequence_parallel import SequenceParallel, first_input
from shardformer.layers.parallel_module import ParallelModule
from shardformer.matmul.kernel import LinearKernel, autocast, linear
from shardformer.matmul.native import NATIVE, Blocked, MatmulLayer, is_transposed
from shardformer.matmul.quantised import KINDS
from shardformer.shard_spec import Part, ShardSpec, annotate, pad_to_multiple, parameter_like, shard_parameter
from shardformer.utils.untraced import call_through

# The first that accepts a native layer cuts it and multiplies.
KERNELS: tuple[LinearKernel, ...] = (*KINDS, Blocked(), NATIVE)


def kernel_of(native: nn.Module, group: ProcessGroup) -> LinearKernel:
    """Return the kernel of the shards of a native layer."""
    return next(kernel for kernel in KERNELS if kernel.accepts(native, group))


class ColumnParallelLinear(ParallelModule, MatmulLayer):
    """Linear layer whose output features are sharded over the tensor-parallel axis.

    Input: [..., in_features], the same on every rank. Output: [..., local out_features]; with `gather_output` the
    whole [..., out_features] on every rank.

    Args:
        weight: local weight, [local out, in], or [in, local out] when `transposed`.
        bias: local bias [local out] or None.
        features: sharding of the output features, of one dim.
        transposed: the weight is stored as in `Conv1D`.
        gather_output: all-gather the output features.
        input_is_gathered: the input comes from a sequence-parallel gather, which already sums its gradient.
    """

    shards_layer = True
    can_stay_whole = True
    takes_kernels = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: ProcessGroup,
        features: ShardSpec,
        *,
        transposed: bool = False,
        gather_output: bool = False,
        input_is_gathered: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.features = group, features
        self.transposed, self.gather_output, self.input_is_gathered = (transposed, gather_output, input_is_gathered)
        self.adds_bias = True  # False if a following activation adds it
        (self.full_out_features,) = features.full_shape
        self._shared_input: SharedInput | None = None

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> ColumnParallelLinear:
        """Shard a native linear layer; see `column_layer`."""
        return column_layer(ColumnParallelLinear, module, process_group, **kwargs)

    @staticmethod
    def keep_whole(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> None:
        """Prepare a layer whose weight stays whole on every rank."""
        if kwargs.pop("gather_output", False):
            return
        spec = column_spec(out_features(module), process_group, **kwargs)
        call_through(module, lambda call, args, kwargs: split_features(call(*args, **kwargs), spec, process_group))

    @property
    def matrix(self) -> Tensor:
        """Return the local weight as [local out, in]."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, seq, in] -> [batch, seq, out]; which of the two are shards depends on the layer."""
        out = self._shared_input(self, x) if self._shared_input is not None else self.project(x)
        if not self.gather_output:
            return out
        return gather_from_region(out, out.dim() - 1, self.group)[..., : self.full_out_features]

    def project(self, x: Tensor) -> Tensor:
        """Compute [..., in] -> [..., local out]."""
        return _project(x, [self])[0]

    def copied(self, x: Tensor) -> Tensor:
        """Let the gradient of an input that ranks share be summed over them."""
        if self.input_is_gathered:
            return x
        if self._shared_input is not None and torch.compiler.is_compiling():
            return self._shared_input.copied(self, x)
        return copy_to_region(*autocast(x), self.group)

    @property
    def added_bias(self) -> Tensor | None:
        """The bias that this layer adds itself; None if a fused operator adds it later."""
        return self.bias if self.adds_bias else None

    def extra_repr(self) -> str:
        """Describe the shard for `repr`."""
        return f"full_out_features={self.full_out_features}, local_weight={tuple(self.weight.shape)}"


class RowParallelLinear(ParallelModule, MatmulLayer):
    """Linear layer whose input features are sharded over the tensor-parallel axis.

    Input: [..., local in_features]. Output: the sum over ranks, [..., out_features], on every rank; in a
    sequence-parallel region, this rank's slice of its sequence. The bias is added once, after the sum.

    Args:
        weight: local weight, [out, local in], or [local in, out] when `transposed`.
        bias: whole bias [out] or None.
        features: sharding of the input features, of one dim.
        outputs: sharding of the output features, where the kernel cuts the weight between these; None otherwise.
        transposed: the weight is stored as in `Conv1D`.
        sequence: the sequence-parallel region that the output enters, or None.
        splits_input: the input is whole on every rank; each rank reads its own features.
    """

    shards_layer = True
    can_stay_whole = True
    takes_kernels = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: ProcessGroup,
        features: ShardSpec,
        *,
        outputs: ShardSpec | None = None,
        transposed: bool = False,
        sequence: SequenceParallel | None = None,
        splits_input: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.transposed, self.sequence = group, transposed, sequence
        self.splits_input, self.adds_bias = splits_input, True
        self.features, self.outputs = features, outputs

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: ProcessGroup,
        *,
        num_heads: int | None = None,
        **kwargs: Any,
    ) -> RowParallelLinear:
        """Shard a native linear layer; `num_heads` attention heads along the input are never split."""
        kernel = kernel_of(module, process_group)
        num_out, num_in = kernel.shape(module)
        features = row_spec(num_in, process_group, num_heads)
        outputs = None if kernel.cuts_inputs(module, features) else row_spec(num_out, process_group)
        weight = kernel.cut(module, outputs or features, 1 if outputs is None else 0)
        bias = module.bias
        if bias is not None:
            # Under sequence parallelism the bias is added to this rank's tokens only: its gradient is a partial sum.
            bias = parameter_like(bias, bias.data)
            whole = ShardSpec(tuple(bias.shape), rank=features.rank, world_size=features.world_size)
            sequence = kwargs.get("sequence")
            annotate(bias, whole, None if sequence is None else sequence.grad_group)
        kwargs |= {"outputs": outputs, "transposed": is_transposed(module)}
        layer = RowParallelLinear(weight, bias, process_group, features, **kwargs)
        layer.kernel = kernel
        kernel.prepare(layer, module)
        return layer

    @staticmethod
    def keep_whole(
        module: nn.Module,
        process_group: ProcessGroup,
        *,
        num_heads: int | None = None,
        splits_input: bool = False,
        **kwargs: Any,
    ) -> None:
        """Prepare a layer whose weight stays whole on every rank."""
        if splits_input:
            return
        spec = row_spec(in_features(module), process_group, num_heads)

        def of_joined(call: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
            args, kwargs = first_input(args, kwargs, lambda x: gather_features(x, spec, process_group))
            return call(*args, **kwargs)

        call_through(module, of_joined)

    @property
    def matrix(self) -> Tensor:
        """Return the local weight as [out, local in]."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, seq, in] -> [batch, seq, out]; which of the two are shards depends on the layer."""
        out = self.kernel.rows(self, x)
        return out if self.bias is None or not self.adds_bias else out + self.bias.to(out.dtype)

    def own_features(self, x: Tensor) -> Tensor:
        """Return this rank's features of the input."""
        return split_features(x, self.features, self.group) if self.splits_input else x

    def summed(self, out: Tensor) -> Tensor:
        """Sum partial products over ranks: [..., out] on every rank, or this rank's slice of its sequence."""
        return reduce_from_region(out, self.group) if self.sequence is None else self.sequence.reduce_scatter(out)

    def extra_repr(self) -> str:
        """Describe the shard for `repr`."""
        shapes = f"full_shape={self.weight.shard_spec.full_shape}, local_weight={tuple(self.weight.shape)}"
        return shapes if self.outputs is None else f"{shapes}, cut=outputs"


class SharedInput:
    """Runs column-parallel layers that read the same input (query, key, value) as one autograd node.

    Their input gradients are summed locally first, so one all-reduce serves all of them and overlaps the computation
    of the weight gradients. A layer called with a different input (cross-attention) runs alone.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = tuple(layers)
        self._input: Tensor | None = None
        self._version: int | None = None  # of the input; None for a pending gather, which writes its values later
        self._differentiates = False
        self._copied: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for layer in self.layers:
            layer._shared_input = self

    def __call__(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        """Return the output of one layer; the first call for an input computes those of all layers."""
        if torch.compiler.is_compiling():
            return layer.project(x)
        is_same = x is self._input and torch.is_grad_enabled() is self._differentiates
        is_same = is_same and (self._version is None or self._version == x._version)
        if not is_same or id(layer) not in self._outputs:
            is_pending = hasattr(x, "pending_gather")
            # Of a tensor of inference mode nothing tells whether it was written to since.
            if layer is not self.layers[0] or (not is_pending and x.is_inference()):
                return layer.project(x)
            outputs = _project(x, self.layers)
            self._input, self._differentiates = x, torch.is_grad_enabled()
            self._version = None if is_pending else x._version
            self._outputs = dict(zip(map(id, self.layers), outputs, strict=True))
        out = self._outputs.pop(id(layer))
        if not self._outputs:
            self._input = None
        return out

    def copied(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        """Return the input of one layer in a graph, where those that read the same one share its all-reduce."""
        if self._input is not x:
            self._input, self._copied = x, copy_to_region(*autocast(x), layer.group)
        copied = self._copied
        if layer is self.layers[-1]:
            self._input = self._copied = None  # what remains would be an output of the graph
        return copied


def column_layer(
    cls: type[ColumnParallelLinear],
    module: nn.Module,
    group: ProcessGroup,
    *,
    gather_output: bool = False,
    input_is_gathered: bool = False,
    **kwargs: Any,
) -> Any:
    """Shard a native linear layer between its outputs, as a layer of a class.

    Raises:
        TypeError: `module` is not a linear layer.
        ValueError: `gather_output` is set for a fused projection or for heads.
    """
    kernel = kernel_of(module, group)
    features = column_spec(kernel.shape(module)[0], group, gather_output=gather_output, **kwargs)
    grad_group = copies_group(group, features.copies)
    weight = kernel.cut(module, features, 0)
    annotate(weight, weight.shard_spec, grad_group)
    bias = None if module.bias is None else shard_parameter(module.bias, features, grad_group)
    options = {"gather_output": gather_output, "input_is_gathered": input_is_gathered}
    layer = cls(weight, bias, group, features, transposed=is_transposed(module), **options)
    layer.kernel = kernel
    kernel.prepare(layer, module)
    return layer


def column_spec(
    features: int,
    group: ProcessGroup,
    num_heads: int | None = None,
    part_size: int | None = None,
    parts: tuple[Part, ...] | None = None,
    divisible_by: int | None = None,
    gather_output: bool = False,
    **_: Any,
) -> ShardSpec:
    """Return the sharding of a layer's output features, one dim.

    Args:
        num_heads: attention heads in each part; a head is never split, and heads fewer than ranks are replicated.
        part_size: features of each part of a fused projection (query, key, value); each part is sharded separately.
        parts: the parts of a fused projection, if they differ in size.
        divisible_by: pad the output features to a multiple of this times the number of ranks (vocabularies).

    Raises:
        ValueError: `gather_output` is set for a fused projection or for heads.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    part_size = part_size or features
    if gather_output:
        if num_heads is not None or part_size != features:
            raise ValueError("gather_output=True cannot put fused parts or heads together; use gather_output=False")
        divisible_by = divisible_by or 1  # an all-gather needs equal shards
    padded = pad_to_multiple(part_size, divisible_by * num_parts(group)) if divisible_by else None
    unit, copies = 1, 1
    if num_heads is not None:
        unit, copies = part_size // num_heads, max(1, world_size // num_heads)
    # A model with no shared experts has a layer of no features.
    parts = parts or tuple(Part(part_size, unit, padded) for _ in range(features // max(part_size, 1)))
    return ShardSpec((features,), 0, parts, rank, world_size, copies)


def row_spec(features: int, group: ProcessGroup, num_heads: int | None = None) -> ShardSpec:
    """Return the sharding of a layer's input features, one dim."""
    part = Part(features, features // num_heads if num_heads else 1)
    return ShardSpec((features,), 0, (part,), dist.get_rank(group), dist.get_world_size(group))


def out_features(module: nn.Module) -> int:
    """Return a layer's number of output features, in any weight layout; TypeError if it is not linear."""
    return _features(module, "out_features", 0)


def in_features(module: nn.Module) -> int:
    """Return the number of input features of a linear layer, in any weight layout; raises like `out_features`."""
    return _features(module, "in_features", 1)


def _features(module: nn.Module, name: str, dim: int) -> int:
    said = getattr(module, name, None)  # a 4-bit weight has another shape
    if isinstance(said, int):
        return said
    transposed = is_transposed(module)  # raises TypeError for other modules
    return module.weight.shape[1 - dim if transposed else dim]


def copies_group(group: ProcessGroup, copies: int) -> ProcessGroup | None:
    """Return the `copies` adjacent ranks of `group` that hold the same key/value heads; None if `copies` is 1."""
    if copies == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    if copies == len(ranks):
        return group
    start = dist.get_rank(group) // copies * copies
    members = ranks[start : start + copies]
    # Local synchronization: only the members take part, so other ranks need not make this call.
    create = partial(new_group, members, use_local_synchronization=True)
    return ProcessGroups.of_world().get_or_create((LOCAL, "copies", *members), create)


def _project(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> Sequence[Tensor]:
    """Compute [..., in] -> [..., local out] for each layer; all of them read `x`."""
    kernel = layers[0].kernel
    for layer in layers:
        if layer.kernel is not kernel:
            return LinearKernel.columns(kernel, layers, x)
    return kernel.columns(layers, x)


class MultiQueryLinear(ParallelModule, MatmulLayer):
    """Fused projection [query heads, keys, values] with fewer key/value heads than ranks.

    Input: [..., in_features], the same on every rank. Output: [..., (local query heads + 2) * head_dim]. The weight
    stays whole on every rank. Each rank computes with the rows of its query heads and of the key and value head that
    they share, so its gradient is a partial sum.
    """

    shards_layer = True

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
    ) -> MultiQueryLinear:
        """Convert a fused projection of `num_heads` query and `num_groups` key and value heads of `head_dim`."""
        return MultiQueryLinear(module, process_group, (num_heads, num_groups, head_dim), input_is_gathered)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, seq, hidden] -> [batch, seq, features of this rank]."""
        weight = torch.cat([self.weight[rows] for rows in self.rows])
        bias = None if self.bias is None else torch.cat([self.bias[rows] for rows in self.rows])
        if hasattr(x, "pending_gather"):  # no overlap for this rare layer
            x = x.pending_gather.tokens()
        x = x if self.input_is_gathered else copy_to_region(x, self.group)
        return linear(x, weight, bias, self.kernel, self.weight_grad_store)


class StateSpaceProjection(ColumnParallelLinear):
    """Column-parallel projection to [gate, channels, B and C, time steps], whose third part every rank gets whole.

    The heads of Mamba-2 (arXiv 2405.21060, section 7) are sharded, and all read one B and C.
    """

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
