"""A bucket: parameters that live, are reduced and are updated together in flat memory.

The parameters become views of one flat buffer. Gradients are accumulated in another, in at least fp32, and are
reduced over the data-parallel ranks in one collective: reduce-scattered under ZeRO stage 1 (Rajbhandari et al., arXiv
1910.02054), all-reduced under stage 0. What a rank keeps of the result is its shard; the optimizer sees the shard as
pieces of parameters, so that states and skipped updates stay those of single parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.zero.exchange import Exchange, PendingGather, PendingShard
from plugins.hybrid_parallel.zero.gradient_memory import GradientMemory
from shardformer.collectives import all_gather_flat
from shardformer.shard_spec import pad_to_multiple

# Parameters and shards start at multiples of this many elements: kernels read what begins in the middle of a cache line
# more slowly (docs/levers.md).
_ALIGNMENT = 16


@dataclass(frozen=True)
class BucketOptions:
    """What the buckets of one optimizer have in common.

    Attributes:
        dp_group: the ranks that hold the same pieces of these parameters, and see other tokens.
        zero_stage: 0 or 1.
        master_weights: whether 16-bit parameters get fp32 copies for the optimizer.
        whole_parameters: whether the optimizer needs parameters uncut (Adafactor, Muon).
        bucket_bytes: upper limit of a bucket's gradients.
        exchange: how shards of gradients and parameters get from rank to rank.
    """

    dp_group: ProcessGroup
    zero_stage: int
    master_weights: bool
    whole_parameters: bool
    bucket_bytes: int
    exchange: Exchange

    @property
    def num_shards(self) -> int:
        return dist.get_world_size(self.dp_group) if self.zero_stage else 1

    @property
    def counts(self) -> bool:
        """Whether this rank counts what it has of these parameters, of which it may hold a copy (stage 0)."""
        return self.zero_stage == 1 or dist.get_rank(self.dp_group) == 0

    @property
    def shard_index(self) -> int:
        return dist.get_rank(self.dp_group) if self.zero_stage else 0


class Piece:
    """The part of one parameter that lies in this rank's shard.

    Attributes:
        index: the parameter's position in its bucket.
        start, stop: range in the flattened parameter.
        offset: where the piece starts in the shard.
        parameter: what the optimizer updates; fp32 where there are master weights.
    """

    def __init__(self, index: int, start: int, stop: int, offset: int) -> None:
        self.index, self.start, self.stop, self.offset = index, start, stop, offset
        self.parameter: nn.Parameter | None = None

    def view(self, shard: Tensor) -> Tensor:
        """The piece's range of a flat tensor over the shard."""
        return shard[self.offset : self.offset + self.stop - self.start]


class Bucket:
    """Parameters of one dtype, one parameter group and one way of summing gradients.

    Args:
        params: the local parameters.
        options: what the buckets of an optimizer share.
        group_index: parameter group of the optimizer.
        sum_groups: further groups over which the gradients are partial sums (tensor-parallel, tied stages).
        counted: whether this rank counts these parameters in the global norm.
        masters: full-precision values of parameters that were cast down.
        tied_group: the one of `sum_groups` whose ranks are pipeline stages that hold the same parameters, or None.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        options: BucketOptions,
        group_index: int,
        sum_groups: Sequence[ProcessGroup],
        counted: bool,
        masters: dict[nn.Parameter, Tensor],
        tied_group: ProcessGroup | None = None,
    ) -> None:
        self.params, self.options, self.group_index = list(params), options, group_index
        self.sum_groups, self.counted, self.tied_group = list(sum_groups), counted, tied_group
        sizes = [param.numel() for param in params]
        self.offsets, size = places_in_bucket(sizes, options.num_shards, options.whole_parameters)
        self._gaps = _gaps(self.offsets, sizes, size)
        self.shard_size = size // options.num_shards
        dtype, device = params[0].dtype, params[0].device
        self.grad_dtype = torch.promote_types(dtype, torch.float32)

        self.flat = options.exchange.empty(size, dtype, device).zero_()
        self.has_masters = options.master_weights and self.grad_dtype != dtype
        master_dtype = self.grad_dtype if self.has_masters else dtype
        sources = [masters.get(param, param.data) for param in params]
        for param, offset in zip(params, self.offsets, strict=True):
            view = self.flat[offset : offset + param.numel()].view_as(param)
            view.copy_(param.data)
            param.data = view
        self.pieces = self._make_pieces(sources, master_dtype)

        # Allocated on the first gradient. Where gradients are sharded, until they are reduced.
        self.memory = GradientMemory(options.exchange)
        self.flat_grads: Tensor | None = None
        self.shard_grads: Tensor | None = None
        self.written: set[int] = set()  # parameters with local gradients that are not reduced yet
        self.adds = False  # whether some gradient of this step is a sum over passes
        self._lent: set[int] = set()  # parameters whose gradients a product was given the place of
        self.used: set[int] = set()  # parameters with reduced gradients
        self._work: Any = None
        self._pending: PendingShard | None = None
        self._result: Tensor | None = None
        self._norm: Tensor | None = None  # of the result
        self._own_norms: Sequence[Tensor] | None = None

    # ----- accumulation and reduction -----

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add a local gradient."""
        if self.launched:
            raise RuntimeError("a gradient arrived after its bucket was reduced; run the backward pass once a step")
        self._provide_flat_grads()
        view = self._grad_view(index)
        if index in self._lent:
            self._lent.discard(index)
            self.written.add(index)
            if grad.data_ptr() != view.data_ptr():  # what was written there, and more
                view.copy_(grad)
        elif index in self.written:
            self.adds = True
            view.add_(grad)
        else:
            view.copy_(grad)
            self.written.add(index)

    def lend(self, index: int) -> tuple[Tensor, bool] | None:
        """Where to write a gradient that `accumulate` gets next, and whether to add it; None to have it copied."""
        if self.launched or index in self._lent:
            return None
        self._provide_flat_grads()
        self._lent.add(index)
        self.adds = self.adds or index in self.written
        return self._grad_view(index), index in self.written

    def launch(self) -> None:
        """Start the reduction over the data-parallel ranks."""
        self._provide_flat_grads()
        for index in range(len(self.params)):
            if index not in self.written:
                self._grad_view(index).zero_()
        group = self.options.dp_group
        if dist.get_world_size(group) == 1:
            self._result = self.flat_grads
        elif self.options.zero_stage == 0:
            self._result = self.flat_grads
            self._work = dist.all_reduce(self._result, group=group, async_op=True)
        else:
            result = self.flat_grads.new_empty(self.shard_size)
            self._pending = self.options.exchange.reduce_scatter(self.flat_grads, result)

    @property
    def launched(self) -> bool:
        return self._result is not None or self._pending is not None

    def collect(self) -> None:
        """Wait for the result of the reduction."""
        if self._work is not None:
            self._work.wait()
        if self._pending is None or self._result is not None:
            return
        self._result = self._pending.wait()
        self._norm = torch.linalg.vector_norm(self._result)
        # A GPU would have to be waited for.
        self._pending.settle(math.isfinite(self._norm) if self.flat.device.type == "cpu" else None)

    def give_up_gradients(self) -> None:
        """Give away the memory of the local gradients once nobody reads them, unless they are to be described."""
        if self._pending is None:
            return
        self.collect()
        is_finite = self._pending.settled()
        self._pending = None
        if is_finite is None:
            self._own_norms = torch._foreach_norm([self._grad_view(index) for index in range(len(self.params))])
        if is_finite is not False:
            self.memory.give(self.flat_grads)
            self.flat_grads = None

    def finish(self, used: set[int], factor: Tensor | None) -> None:
        """Complete the reduction and add its result to what the shard has.

        Args:
            used: parameters that have a gradient on any data-parallel rank.
            factor: what this step's gradients are multiplied by.
        """
        self.collect()
        self.give_up_gradients()
        for group in self.sum_groups:
            dist.all_reduce(self._result, group=group)
        if factor is not None:
            self._result.mul_(factor.to(self._result.dtype))
        if self.sum_groups or factor is not None or self.used:
            self._norm = None
        if self.used:
            self.shard_grads.add_(self._result)
        elif self._result is self.flat_grads:
            # The result is the shard: the buffers change places instead of being copied.
            self.flat_grads, self.shard_grads = self.shard_grads, self.flat_grads
        else:
            self.shard_grads = self._result
        self.used |= used
        self.adds = False
        self.written.clear()
        self._work = self._result = None

    def own_grads(self) -> dict[int, Tensor] | None:
        """What this rank put into the last reduction, by parameter, or its norms where that is gone.

        None where the result has taken its place, or is finite.
        """
        if self.options.num_shards == 1:
            return None
        if self.flat_grads is not None:
            return {index: self._grad_view(index) for index in range(len(self.params))}
        return None if self._own_norms is None else dict(enumerate(self._own_norms))

    def clear_grads(self) -> None:
        """Forget all gradients."""
        if self.options.num_shards > 1:
            self.shard_grads = None  # the activations of the next forward pass take the memory
        self.written.clear()
        self._lent.clear()
        self.used.clear()
        for piece in self.pieces:
            piece.parameter.grad = None

    # ----- the optimizer's view -----

    def squared_norm(self) -> Tensor:
        """Sum of squares of this rank's reduced gradients (0-d, float64)."""
        if not self.used:
            return torch.zeros((), dtype=torch.float64, device=self.flat.device)
        norm = torch.linalg.vector_norm(self.shard_grads) if self._norm is None else self._norm
        return norm.double().square()

    def assign_grads(self, factor: Tensor | float | None) -> None:
        """Give each piece its gradient, times `factor`; pieces of unused parameters get none."""
        if factor is not None and self.used:
            self._norm = None
            self.shard_grads.mul_(factor if isinstance(factor, float) else factor.to(self.shard_grads.dtype))
        for piece in self.pieces:
            grad = piece.view(self.shard_grads).view_as(piece.parameter) if piece.index in self.used else None
            piece.parameter.grad = grad if grad is None else grad.to(piece.parameter.dtype)

    def publish(self) -> PendingGather | None:
        """Write updated values to the parameters of all ranks; what to wait for, None where there is nobody else."""
        own = self.own_shard(self.flat)
        if self.has_masters:
            for piece in self.pieces:
                piece.view(own).copy_(piece.parameter.detach().view(-1))
        if self.options.num_shards == 1:
            return None
        return self.options.exchange.all_gather(self.flat)

    def refresh_masters(self) -> None:
        """Take the parameters' present values as the optimizer's (after weights were loaded)."""
        if self.has_masters:
            own = self.own_shard(self.flat)
            for piece in self.pieces:
                piece.parameter.data.view(-1).copy_(piece.view(own))

    def own_shard(self, flat: Tensor) -> Tensor:
        """This rank's range of a flat tensor over the bucket."""
        start = self.options.shard_index * self.shard_size
        return flat[start : start + self.shard_size]

    def gather_pieces(self, values: dict[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """Whole local tensors from pieces: parameter index -> values of its piece here, in the parameter's shape.

        All data-parallel ranks take part with their own pieces; parameters that no rank gives come back as zeros.
        """
        flat = torch.zeros(self.flat.numel(), dtype=dtype, device=self.flat.device)
        own = self.own_shard(flat)
        for piece in self.pieces:
            if piece.index in values:
                piece.view(own).copy_(values[piece.index].reshape(-1))
        if self.options.num_shards > 1:
            all_gather_flat(flat, own.clone(), group=self.options.dp_group)
        return {
            index: flat[offset : offset + param.numel()].view_as(param)
            for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True))
        }

    # ----- construction -----

    def _make_pieces(self, sources: Sequence[Tensor], dtype: torch.dtype) -> list[Piece]:
        shard_start = self.options.shard_index * self.shard_size
        shard = torch.zeros(self.shard_size, dtype=dtype, device=self.flat.device) if self.has_masters else None
        pieces = []
        for index, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            start = max(0, shard_start - offset)
            stop = min(param.numel(), shard_start + self.shard_size - offset)
            if start >= stop:
                continue
            piece = Piece(index, start, stop, offset + start - shard_start)
            view = piece.view(shard if shard is not None else self.own_shard(self.flat))
            view.copy_(sources[index].reshape(-1)[start:stop])
            whole = stop - start == param.numel()
            piece.parameter = nn.Parameter(view.view_as(param) if whole else view)
            pieces.append(piece)
        return pieces

    def _provide_flat_grads(self) -> None:
        if self.flat_grads is None and not self.used and self.options.num_shards == 1:
            # Of the last step's gradients, which were cleared, only the memory is left.
            self.flat_grads, self.shard_grads = self.shard_grads, None
        if self.flat_grads is None:
            self.flat_grads = self.memory.take(self.flat.numel(), self.grad_dtype, self.flat.device)
            # What belongs to no parameter takes part in the norm.
            for start, stop in self._gaps:
                self.flat_grads[start:stop].zero_()

    def _grad_view(self, index: int) -> Tensor:
        param, offset = self.params[index], self.offsets[index]
        return self.flat_grads[offset : offset + param.numel()].view_as(param)


def places_in_bucket(sizes: Sequence[int], num_shards: int, whole_parameters: bool) -> tuple[list[int], int]:
    """Where each parameter starts in the flat buffer, and the buffer's size, divisible by the number of shards."""
    if not whole_parameters or num_shards == 1:
        padded = [pad_to_multiple(size, _ALIGNMENT) for size in sizes]
        offsets = [sum(padded[:index]) for index in range(len(sizes))]
        return offsets, pad_to_multiple(sum(padded), num_shards * _ALIGNMENT)
    # Whole parameters are dealt out, the largest first to the emptiest shard; shards are padded to the fullest.
    loads, places = [0] * num_shards, [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        shard = loads.index(min(loads))
        places[index] = (shard, loads[shard])
        loads[shard] += pad_to_multiple(sizes[index], _ALIGNMENT)
    shard_size = pad_to_multiple(max(loads), _ALIGNMENT)
    return [shard * shard_size + start for shard, start in places], shard_size * num_shards


def _gaps(offsets: Sequence[int], sizes: Sequence[int], total: int) -> list[tuple[int, int]]:
    """The ranges of a flat buffer that belong to no parameter."""
    gaps, end = [], 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        if offset > end:
            gaps.append((end, offset))
        end = offset + size
    return gaps if end == total else [*gaps, (end, total)]
