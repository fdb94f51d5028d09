"""Blocks: a tensor-parallel axis that computes in a fixed number of blocks, whatever the number of its ranks.

Each weight of a tensor-parallel region is divided into blocks of heads or features, and a rank computes its blocks one
after the other. Every product then has the same shape on one rank as on many, and sums over blocks are added along one
binary tree: a rank adds up its own subtree, and the rest after an all-gather.

BlockedTensor: the value of a rank inside of a tensor-parallel region that is computed in blocks.

It looks like the tensor of one block. Every operation on it runs once for each block of this rank, on tensors of their
own, so that kernels see the same shapes, strides and alignment however many blocks a rank has. The code of a model
needs no change.

The autograd pairs at the border of a tensor-parallel region that is computed in blocks; see `collectives.py`.

`f` gives each block the same value and adds up the gradients of all blocks, `g` the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.random import restoring_default_generators, seed_default_generators
from shardformer.shard_spec import ShardSpec

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _itself(parameter: Tensor) -> Tensor:
    return parameter


@dataclass(frozen=True)
class Blocks:
    """The blocks of one axis."""

    count: int  # number of blocks on all ranks, a power of two
    local: range  # indices of the blocks of this rank
    # returns an alias of a parameter for one of several blocks that read it; code that adds up gradients exactly lets
    # the gradient of each be a summand of its own
    use: Callable[[Tensor], Tensor] = _itself
    sequence_count: int = 1  # number of blocks that sequences are divided into between tensor-parallel regions

    def slices(self, spec: ShardSpec) -> list[list[slice]]:
        """Return where each local block lies in this rank's shard: one slice of the sharded dim for each part."""
        return [self._slices_of(block, spec) for block in self.local]

    def _slices_of(self, block: int, spec: ShardSpec) -> list[slice]:
        units = spec.parts[0].size // spec.parts[0].unit
        wanted = replace(spec, rank=block, world_size=self.count, copies=max(1, self.count // units))
        found, position = [], 0
        for part, mine, own in zip(spec.parts, spec.pieces(), wanted.pieces(), strict=True):
            size = own[1] - own[0] + own[2]
            # Rows of padding have no place in the full tensor.
            first = (block - self.local[0]) * size if part.padded_size is not None else own[0] - mine[0]
            found.append(slice(position + first, position + first + size))
            position += mine[1] - mine[0] + mine[2]
        return found


# Weak keys: torch holds a process group until it is destroyed.
_BLOCKS_OF: WeakKeyDictionary[ProcessGroup, Blocks] = WeakKeyDictionary()


def compute_in_blocks(
    group: ProcessGroup, count: int, use: Callable[[Tensor], Tensor] = _itself, sequence_count: int = 1
) -> None:
    """Let layers on the axis `group` compute in `count` blocks; the group must not serve other models."""
    _BLOCKS_OF[group] = Blocks(count, own_blocks(count, group), use, sequence_count)


def own_blocks(count: int, group: ProcessGroup) -> range:
    """Return the indices of this rank's blocks."""
    share, rank = count // dist.get_world_size(group), dist.get_rank(group)
    return range(rank * share, (rank + 1) * share)


def blocks_of(group: ProcessGroup | None) -> Blocks | None:
    """Return the blocks of an axis; None if each rank computes its shard at once."""
    return None if group is None else _BLOCKS_OF.get(group)


def num_parts(group: ProcessGroup) -> int:
    """Return the number of parts that a layer is computed in: blocks, or ranks."""
    blocks = blocks_of(group)
    return dist.get_world_size(group) if blocks is None else blocks.count


def rank_of_draws(group: ProcessGroup) -> int:
    """Return the number by which this rank's draws in a region differ from others'; blocks draw by index."""
    return dist.get_rank(group) if blocks_of(group) is None else 0


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add up 2**n tensors along a binary tree."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def sum_over_blocks(parts: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Return the sum of `parts`, the local blocks, over all blocks of all ranks, in one order for any ranks."""
    local, size = tree_sum(parts), dist.get_world_size(group)
    if size == 1:
        return local
    local = local.contiguous()
    everyone = local.new_empty((size, *local.shape))
    all_gather_flat(everyone.view(-1), local.view(-1), group=group)
    return tree_sum(everyone.unbind())


_DRAW = frozenset(
    {F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu}
    | {F.scaled_dot_product_attention, F.gumbel_softmax, torch.dropout, torch.bernoulli, torch.rand_like}
    | {torch.randn_like, torch.multinomial, torch.normal, torch.native_dropout}
    | {getattr(Tensor, name) for name in ("bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_", "random_")}
)
_READ = frozenset(
    getattr(Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy")
)


class BlockedTensor(Tensor):
    """One tensor for each block of this rank."""

    blocks: tuple[Tensor, ...]  # the tensors, each with its own autograd graph
    region: Blocks  # the blocks of the axis

    @staticmethod
    def __new__(cls, blocks: Sequence[Tensor], region: Blocks) -> BlockedTensor:
        """Create a tensor without values of its own, which describes the first block."""
        first = blocks[0]
        self = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)
        self.blocks, self.region = tuple(blocks), region
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run `func` for each block, other results by the first; RuntimeError if a value of blocks is read."""
        if func in _READ:
            raise RuntimeError(
                f"{func.__name__} reads a value inside of a tensor-parallel region, which reproducible=True computes "
                "in blocks with other values; use reproducible_blocks=1, or reproducible=False"
            )
        kwargs = dict(kwargs or {})
        if func is torch.autograd.backward:
            tensors, kwargs["grad_tensors"] = _each_block_a_root(args[0], kwargs.get("grad_tensors"))
            return func(tensors, **kwargs)
        example = next(_blocked_in((args, kwargs)))
        results: list[Any] = []
        for index, _ in _streams(example.region) if func in _DRAW else enumerate(example.blocks):
            of_block = {name: _of_block(value, index, example.region) for name, value in kwargs.items()}
            results.append(func(*_of_block(args, index, example.region), **of_block))
            if results[0] is not None and not _has_tensor(results[0]):
                return results[0]
        target = args[0] if args else None
        if isinstance(target, cls) and all(map(_is, results, target.blocks)):
            return target  # an operation in place
        return _joined(results, example.region)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Refuse an operation that did not come through torch's Python interface."""
        raise RuntimeError(
            f"{func} inside of a tensor-parallel region cannot run in blocks, as reproducible=True needs; use "
            "reproducible_blocks=1, or reproducible=False"
        )


def _blocked_in(value: Any) -> Iterator[BlockedTensor]:
    if isinstance(value, BlockedTensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _blocked_in(each)
    elif isinstance(value, dict):
        yield from _blocked_in(list(value.values()))


def _of_block(value: Any, index: int, region: Blocks) -> Any:
    if isinstance(value, BlockedTensor):
        return value.blocks[index]
    if isinstance(value, nn.Parameter) and value.requires_grad and torch.is_grad_enabled():
        return region.use(value)
    if type(value) in (tuple, list):
        return type(value)(_of_block(each, index, region) for each in value)
    return value


def _each_block_a_root(tensors: Sequence[Tensor], grads: Sequence[Tensor | None] | None = None) -> tuple[list, list]:
    """Return the roots of one backward pass through all blocks, and their gradients."""
    roots: list[Tensor] = []
    starts: list[Tensor | None] = []
    for tensor, grad in zip(tensors, grads or [None] * len(tensors), strict=True):
        is_blocked = isinstance(tensor, BlockedTensor)
        roots += tensor.blocks if is_blocked else [tensor]
        starts += grad.blocks if isinstance(grad, BlockedTensor) else [grad] * (len(tensor.blocks) if is_blocked else 1)
    return roots, starts


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


def _joined(results: Sequence[Any], region: Blocks) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return BlockedTensor(results, region)
    if isinstance(first, tuple | list) and _has_tensor(first):
        parts = [_joined(each, region) for each in zip(*results, strict=True)]
        return tuple(parts) if type(first) is tuple else type(first)(parts)
    return first


def _is(first: Any, second: Any) -> bool:
    return first is second


def _streams(region: Blocks) -> Iterator[tuple[int, int]]:
    """Yield each local block's position and index with random numbers of its own; the stream goes on after one."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    with restoring_default_generators():
        for index, block in enumerate(region.local):
            seed_default_generators(seed ^ (0x9E3779B97F4A7C15 * (block + 1) % 2**62))
            yield index, block


_ALIGNMENT = {"cpu": 64, "cuda": 512}  # bytes; torch aligns the memory of a tensor of its own so


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: ProcessGroup) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_over_blocks(grads, ctx.group), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return sum_over_blocks(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *[grad] * ctx.count)


class _Split(torch.autograd.Function):
    """One parameter as one tensor a block, in memory of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dim: int, slices: Sequence[Sequence[slice]]) -> tuple[Tensor, ...]:
        ctx.dim, ctx.slices, ctx.shape = dim, slices, weight.shape
        return tuple(block_of(weight, dim, each) for each in slices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = grads[0].new_empty(ctx.shape)
        for grad, each in zip(grads, ctx.slices, strict=True):
            write_block(whole, ctx.dim, each, grad)
        return whole, None, None


def copy_to_blocks(x: Tensor, blocks: Blocks, group: ProcessGroup) -> BlockedTensor:
    """Apply `f`: every block reads the same input, and the gradient of the input is the sum over all blocks."""
    return BlockedTensor(_Copy.apply(x, len(blocks.local), group), blocks)


def reduce_from_blocks(x: BlockedTensor, group: ProcessGroup) -> Tensor:
    """Apply `g`: add up all blocks; each of them gets the gradient of the sum."""
    return _Sum.apply(group, *x.blocks)


def joined_blocks(x: Tensor, dim: int) -> Tensor:
    """Return what a rank would have computed at once: its blocks behind one another along `dim`."""
    return torch.cat(x.blocks, dim) if isinstance(x, BlockedTensor) else x


def divided_by_heads(x: Tensor, blocks: Blocks) -> BlockedTensor:
    """Return [batch, local heads, ...] as blocks, the reverse of `joined_blocks`."""
    return BlockedTensor([part.contiguous() for part in x.chunk(len(blocks.local), 1)], blocks)


def split_parameter(weight: Tensor, dim: int, slices: Sequence[Sequence[slice]], blocks: Blocks) -> BlockedTensor:
    """Return a parameter's shard as blocks along `dim`, which do not overlap; see `Blocks.slices`."""
    return BlockedTensor(_Split.apply(weight, dim, slices), blocks)


def block_of(weight: Tensor, dim: int, slices: Sequence[slice]) -> Tensor:
    """Copy a block out of a shard: how a kernel rounds may depend on strides and on where its memory begins."""
    return torch.cat([weight.narrow(dim, each.start, each.stop - each.start) for each in slices], dim)


def block_to_read(weight: Tensor, dim: int, slices: Sequence[slice]) -> Tensor:
    """Return a block of a shard: a view that lies in memory as a copy would, else a copy."""
    if len(slices) == 1:
        view = weight.narrow(dim, slices[0].start, slices[0].stop - slices[0].start)
        if view.is_contiguous() and view.data_ptr() % _ALIGNMENT[view.device.type] == 0:
            return view
    return block_of(weight, dim, slices)


def write_block(whole: Tensor, dim: int, slices: Sequence[slice], block: Tensor) -> None:
    """Copy a block to its place in a shard."""
    parts = block.split([each.stop - each.start for each in slices], dim)
    for each, part in zip(slices, parts, strict=True):
        whole.narrow(dim, each.start, each.stop - each.start).copy_(part)
