"""BlockedTensor: the value of a rank inside of a tensor-parallel region that is computed in blocks.

It looks like the tensor of one block. Every operation on it runs once for each block of this rank, on tensors of their
own, so that kernels see the same shapes, strides and alignment however many blocks a rank has. The code of a model
needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.distributed.blocks import Blocks
from shardformer.distributed.random import restoring_default_generators, seed_default_generators

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
    """One tensor for each block of this rank.

    Attributes:
        blocks: the tensors, each with its own autograd graph.
        region: the blocks of the axis.
    """

    blocks: tuple[Tensor, ...]
    region: Blocks

    @staticmethod
    def __new__(cls, blocks: Sequence[Tensor], region: Blocks) -> BlockedTensor:
        """Create a tensor without values of its own, which describes the first block."""
        first = blocks[0]
        self = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)
        self.blocks, self.region = tuple(blocks), region
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run `func` once for each block; what is no tensor (a shape, a dtype) is that of the first block.

        Raises:
            RuntimeError: if code reads a value, which is a different one in each block.
        """
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
        """Refuse an operation that did not come through torch's Python interface.

        Raises:
            RuntimeError: always.
        """
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
    """Yield the position of each local block and its index, with random numbers of its own.

    The stream then continues after a single number, however many blocks there are.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    with restoring_default_generators():
        for index, block in enumerate(region.local):
            seed_default_generators(seed ^ (0x9E3779B97F4A7C15 * (block + 1) % 2**62))
            yield index, block
