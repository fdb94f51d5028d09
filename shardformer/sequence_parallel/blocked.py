"""Sequences in a fixed number of blocks between tensor-parallel regions, whatever the number of ranks.

What sums over tokens there (the gradients of norms and of biases) is computed for each block by itself, and random
numbers are drawn by block, so that a rank of split-gather, which has some of the blocks, finds the same numbers as one
that has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import BlockedTensor, Blocks, all_gather_flat, own_blocks, reduce_from_blocks
from shardformer.distributed.collectives import pad_dim
from shardformer.sequence_parallel.split_gather import SEQ_DIM, SequenceParallel
from shardformer.utils.module_paths import alias_parameters

_FIELDS = "hidden_states"  # hidden_states, encoder_hidden_states, ...


class BlockedSequence(SequenceParallel):
    """Sequence-parallel region whose tokens are a `BlockedTensor` along the sequence: [batch, seq/blocks, hidden] each.

    Inside of a tensor-parallel region ranks have whole sequences, and each weight is computed in blocks of features.

    Args:
        group: process group of the axis.
        blocks: the blocks of the axis.
        is_cut: whether ranks have different blocks of the sequence; otherwise each of them has all.
    """

    sums_gradients = False

    def __init__(self, group: ProcessGroup, blocks: Blocks, is_cut: bool) -> None:
        super().__init__(group)
        self.is_cut, count = is_cut, blocks.sequence_count
        self.blocks = replace(blocks, count=count, local=own_blocks(count, group) if is_cut else range(count))

    @property
    def grad_group(self) -> ProcessGroup | None:
        """The ranks whose gradients of parameters between regions are partial sums; None if they are whole."""
        return self.group if self.is_cut else None

    def enter(self, x: Tensor) -> BlockedTensor:
        """Divide [batch, seq, hidden], the same on every rank, into this rank's blocks."""
        self.length = x.shape[SEQ_DIM]
        return self._divide(x)

    def gather(self, x: BlockedTensor) -> Tensor:
        """Join the blocks of all ranks: [batch, seq, hidden], the same on every rank; `f` sums its gradient.

        Also [batch * seq/blocks, hidden] -> [batch * seq, hidden], for layers that flatten both.
        """
        if x.dim() == 2:
            share = -(-self.length // self.blocks.count)
            return self._gather_whole(x.unflatten(0, (-1, share))).flatten(0, 1)
        return self._gather_whole(x)

    def reduce_scatter(self, x: BlockedTensor) -> BlockedTensor:
        """Add up blocks of features, each [batch, seq, hidden], and keep this rank's blocks of the sequence."""
        whole = reduce_from_blocks(x, self.group)
        if whole.dim() == 2:
            return self._divide(whole.unflatten(0, (-1, self.length))).flatten(0, 1)
        return self._divide(whole)

    def _divide(self, x: Tensor) -> BlockedTensor:
        return BlockedTensor(_Divide.apply(x, self), self.blocks)

    def _gather_whole(self, x: BlockedTensor) -> Tensor:
        return _Join.apply(self, self.length, *x.blocks)

    def parts_of(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's blocks of [batch, seq, hidden], padded with zeros, in memory of their own."""
        parts = pad_dim(whole, SEQ_DIM, self.blocks.count).chunk(self.blocks.count, SEQ_DIM)
        return tuple(parts[index].clone(memory_format=torch.contiguous_format) for index in self.blocks.local)

    def whole_of(self, parts: Sequence[Tensor], length: int) -> Tensor:
        """Return [batch, seq, hidden] from the blocks of all ranks, without padding."""
        if self.is_cut:
            own = torch.stack(parts)
            everyone = own.new_empty((self.blocks.count, *own.shape[1:]))
            all_gather_flat(everyone.view(-1), own.view(-1), group=self.group)
            parts = everyone.unbind()
        return torch.cat(parts, SEQ_DIM).narrow(SEQ_DIM, 0, length).contiguous()


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, region: BlockedSequence) -> tuple[Tensor, ...]:
        ctx.region, ctx.length = region, whole.shape[SEQ_DIM]
        return region.parts_of(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.region.whole_of(grads, ctx.length), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: BlockedSequence, length: int, *parts: Tensor) -> Tensor:
        ctx.region = region
        return region.whole_of(parts, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.region.parts_of(grad)


def use_parameters_by_block(layers: Iterable[nn.Module], region: BlockedSequence) -> None:
    """Let modules between regions read an alias of each parameter for each block; see `Blocks.use`."""
    blocks = region.blocks

    def aliases_of(module: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
        is_between = any(isinstance(x, BlockedTensor) and x.region is blocks for x in inputs)
        if not is_between or not torch.is_grad_enabled():
            return {}
        trained = {name: each for name, each in module._parameters.items() if each is not None and each.requires_grad}
        return {name: BlockedTensor([blocks.use(each) for _ in blocks.local], blocks) for name, each in trained.items()}

    for module in dict.fromkeys(each for layer in layers for each in layer.modules()):
        if any(parameter is not None for parameter in module._parameters.values()):
            alias_parameters(module, aliases_of)


def return_whole_states(model: nn.Module, region: BlockedSequence) -> None:
    """Let `model` return the hidden states of whole sequences, if all ranks have all blocks of them."""

    def join(_: nn.Module, __: tuple, outputs: Any) -> Any:
        for name, value in outputs.items() if isinstance(outputs, Mapping) else ():
            if name.endswith(_FIELDS) and isinstance(value, tuple):
                outputs[name] = tuple(region.gather(x) if isinstance(x, BlockedTensor) else x for x in value)
        return outputs

    model.register_forward_hook(join)
