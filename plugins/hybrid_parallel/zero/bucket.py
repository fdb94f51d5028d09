"""Bucket: parameters that are stored, reduced and updated together in flat memory.

The parameters become views of one flat buffer. Gradients are accumulated in another, in at least fp32, and are
reduced over the data-parallel ranks in one collective: reduce-scattered under ZeRO stage 1 (Rajbhandari et al., arXiv
1910.02054), all-reduced under stage 0. The part of the result that a rank keeps is its shard. Under stage 2 every pass
is reduced by itself, and its shard is added to that of the passes before. The optimizer sees the
shard as pieces of parameters, so that states and skipped updates remain per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.loss.arithmetic import norm_of
from plugins.hybrid_parallel.zero.bucket_gradients import BucketGradients, zero
from plugins.hybrid_parallel.zero.bucket_layout import (
    BucketOptions,
    BucketSlice,
    Source,
    gaps_between,
    move_into,
    places_in_bucket,
    take_source,
)
from plugins.hybrid_parallel.zero.bucket_parameter import show_grad
from plugins.hybrid_parallel.zero.comm.collectives import AllGatherHandle, ReduceScatterHandle
from plugins.hybrid_parallel.zero.grad_buffer_pool import FreshBuffers, GradBufferPool
from plugins.hybrid_parallel.zero.optimizer_shard import OptimizerShard, take_back
from plugins.hybrid_parallel.zero.sharded_parameters import ShardedParameters


class Bucket(BucketGradients):
    """Parameters of one dtype, one parameter group and one way of summing gradients.

    Args:
        params: the local parameters.
        options: options that the buckets of an optimizer share.
        group_index: index of the optimizer's parameter group.
        sum_groups: further groups over which the gradients are partial sums (copies of the shard, tensor-parallel,
            tied stages).
        counted: whether this rank counts these parameters in the global norm.
        initial: sources of the full-precision values of parameters; used ones are removed, others have their values.
        tied_group: the member of `sum_groups` whose ranks are pipeline stages with the same parameters, or None.
        shards_parameters: whether ranks keep only their shard of the parameters (ZeRO stage 3).

    Attributes:
        sharded: the parameters, if ranks keep only their shard of them.
        sum_dtype: dtype in which gradients are summed; None for `grad_dtype`.
    """

    sum_dtype: torch.dtype | None = None

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        options: BucketOptions,
        group_index: int,
        sum_groups: Sequence[ProcessGroup],
        counted: bool,
        initial: dict[nn.Parameter, Source],
        tied_group: ProcessGroup | None = None,
        shards_parameters: bool = False,
    ) -> None:
        super().__init__()
        self._arriving: AllGatherHandle | None = None  # all-gather of parameters that have not been used since
        self._versions: list[int] = []
        self.params, self.options, self.group_index = list(params), options, group_index
        self.sum_groups, self.counted, self.tied_group = list(sum_groups), counted, tied_group
        sizes = [param.numel() for param in params]
        self.offsets, size = places_in_bucket(sizes, options.num_shards, options.whole_parameters)
        self._gaps = gaps_between(self.offsets, sizes, size)
        self.shard_size = size // options.num_shards
        dtype, device = params[0].dtype, params[0].device
        self.grad_dtype = torch.promote_types(dtype, torch.float32)

        sources = [take_source(param, initial) for param in params]
        self._flat = self.sharded = None
        if shards_parameters:
            self.sharded = ShardedParameters(self.params, self.offsets, size, options)
        else:
            self._flat = options.exchange.empty(size, dtype=dtype, device=device).zero_()
            move_into(self._flat, self.params, self.offsets)
        for index, param in enumerate(self.params):
            show_grad(param, self, index)
        updated = self.grad_dtype if options.master_weights else dtype
        own = self.own_shard(self._flat) if self.sharded is None else self.sharded.shard
        self.shard = OptimizerShard(own, updated, options.shard_index * self.shard_size, options.states)
        self.shard.add_pieces(self.params, self.offsets, sources)
        if shards_parameters:
            self.shard.write_parameters()
        self.page_out_values()

        # Allocated on the first gradient. If gradients are sharded, freed after their reduction.
        is_offloaded = options.states.is_offloaded and device.type == "cpu"  # those of a GPU move when they are reduced
        unshared = GradBufferPool(options.states if is_offloaded else options.exchange)
        self.memory = options.grad_buffers if options.num_shards > 1 else unshared
        self.results = GradBufferPool(options.states) if is_offloaded else FreshBuffers()
        self.shard_grads: Tensor | None = None
        self.used: set[int] = set()  # parameters with reduced gradients
        self._work: Any = None
        self._pending: ReduceScatterHandle | None = None
        self._result: Tensor | None = None
        self._sum_of_passes: Tensor | None = None  # shard of the passes that were reduced since the last `keep`
        self.in_passes: set[int] = set()  # parameters with gradients in these passes
        self.norm: Tensor | None = None  # of the result of the reduction; None if it is not known

    @property
    def flat(self) -> Tensor:
        """Memory of the parameters, [ranks * shard]."""
        return self._flat if self.sharded is None else self.sharded.flat

    @property
    def pieces(self) -> Sequence[BucketSlice]:
        """The parts of parameters that the optimizer updates on this rank."""
        return self.shard.pieces

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of 16-bit parameters."""
        return self.shard.is_master

    @property
    def hidden_by(self) -> str | None:
        """The option under which no rank has whole gradients to read; None if ranks have them."""
        return self.options.hidden_by

    # ----- accumulation and reduction -----

    def launch(self) -> None:
        """Start the reduction over the data-parallel ranks."""
        self._provide_flat_grads()
        zero([self._grad_view(index) for index in range(len(self.params)) if index not in self.written])
        if self.options.num_shards == 1:
            self._result = self.flat_grads
            if self.options.zero_stage == 0 and dist.get_world_size(self.options.dp_group) > 1:
                self._work = dist.all_reduce(self._result, group=self.options.dp_group, async_op=True)
        else:
            result = self.results.take(self.shard_size, self.sum_dtype or self.grad_dtype, self.flat.device)
            self._pending = self.options.exchange.reduce_scatter(self.flat_grads, result)

    @property
    def launched(self) -> bool:
        """Whether the reduction of this step's gradients has started."""
        return self._result is not None or self._pending is not None

    def collect(self) -> None:
        """Wait for the result of the reduction."""
        if self._work is not None:
            self._work.wait()
        if self._pending is None or self._result is not None:
            self.page_out_grads()
            return
        self._result = self._pending.wait()
        if self.flat.device.type != "cpu":  # read with the norms of the other buckets, in fewer kernels
            self._pending.mark_done(None)
            return
        self.norm = norm_of(self._result)
        self._pending.mark_done(math.isfinite(self.norm))
        self.page_out_grads()

    def release_local_grads(self) -> None:
        """Free the local gradients once no rank reads them, unless a report on non-finite values may need them."""
        if self._pending is None:
            return
        self.collect()
        is_finite = self._pending.wait_all_done()
        self._pending = None
        # On a GPU no rank knows: the gradients of all buckets are in memory here anyway, and stay until `assign_grads`,
        # except where each pass is reduced so that no rank keeps whole gradients. A report names the sum then.
        keeps = self.options.keeps_local and not self.reduces_each_pass
        if is_finite or (is_finite is None and not keeps):
            self.give_local_grads()

    @property
    def reduces_each_pass(self) -> bool:
        """Whether the gradients of every pass are reduced by themselves (ZeRO stage 2)."""
        return self.options.zero_stage >= 2 and self.options.num_shards > 1

    @property
    def awaits_launch(self) -> bool:
        """Whether `launch` must come before `complete`; the same on all replicas."""
        return not self.launched and (self._sum_of_passes is None or bool(self.written))

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that `complete` and `keep` have not taken yet."""
        return bool(self.written) or self._sum_of_passes is not None

    def add_pass(self) -> None:
        """Complete the reduction of one pass, free its local gradients, and add its shard to that of earlier passes."""
        self.collect()
        self.release_local_grads()
        if self._sum_of_passes is None:
            self._sum_of_passes = self._result
        else:
            self._sum_of_passes.add_(self._result)
            self.results.give(self._result)
        self.in_passes |= self.written
        self.written.clear()
        self.adds = False
        self._work = self._result = self.norm = None
        self.page_out_grads()

    def finish(self, used: set[int], factor: Tensor | None) -> None:
        """Run `complete`, then `keep`."""
        self.complete(factor)
        self.keep(used)

    def complete(self, factor: Tensor | None) -> None:
        """Complete the reduction.

        Args:
            factor: factor on this step's gradients; None for no scaling.
        """
        self.collect()
        self.release_local_grads()
        if self._sum_of_passes is not None:
            if self._result is None:
                self._result = self._sum_of_passes
            else:
                self._result.add_(self._sum_of_passes)
                self.results.give(self._sum_of_passes)
            self._sum_of_passes = self.norm = None
        for group in self.sum_groups:
            dist.all_reduce(self._result, group=group)
        if factor is not None:
            self._result.mul_(factor.to(self._result.dtype))
        if self.sum_groups or factor is not None:
            self.norm = None
        self.page_out_grads()

    def keep(self, used: set[int]) -> None:
        """Add the result of the reduction to the shard.

        Args:
            used: indices of parameters that have a gradient on any data-parallel rank.
        """
        self.clear_stale()
        if self.options.states.is_offloaded and self.flat.device.type != "cpu":
            self.keep_on_host()
        elif self.used:
            self.norm = None
            self.shard_grads.add_(self._result)
            if self._result is not self.flat_grads:
                self.results.give(self._result)
        elif self._result is self.flat_grads:
            # The result is the shard: swap the buffers instead of copying.
            self.flat_grads, self.shard_grads = self.shard_grads, self.flat_grads
        else:
            self.shard_grads = self._result
        self._stale.clear()
        self.used |= used
        self.adds = False
        self.written.clear()
        self.in_passes.clear()
        self._work = self._result = None
        self.page_out_grads()

    # ----- the optimizer's view -----

    def assign_grads(self, factor: Tensor | float | None) -> None:
        """Assign each piece its gradient times `factor`; pieces of unused parameters get None.

        The local gradients are freed: the step is not reported as non-finite any more.
        """
        if self.options.num_shards > 1 and self.flat_grads is not None and not self.written:
            self.give_local_grads()
        if factor is not None:
            self.scale_grads(factor)
        views = self._views_of_pieces(self.shard_grads.to(self.shard.values)) if self.used else ()
        for place, piece in enumerate(self.pieces):
            piece.parameter.grad = views[place] if piece.index in self.used else None
        self.page_out_grads()

    def all_gather_params(self, overlaps: bool = False) -> AllGatherHandle | None:
        """Write updated values to the parameters of all ranks; return the all-gather, None if there is one shard.

        Args:
            overlaps: whether the following code does not wait until it uses the parameters.
        """
        self.shard.write_parameters()
        self.page_out_values()
        if self.options.num_shards == 1 or self.sharded is not None:
            return None
        gather = self.options.exchange.all_gather(self.flat, is_copied=overlaps)
        if overlaps:
            self._arriving, self._versions = gather, [param._version for param in self.params]
        return gather

    def arrive(self) -> None:
        """Wait for the parameters of the last step.

        Raises:
            ConfigurationError: if a parameter was changed before it was gathered.
        """
        if self._arriving is None:
            return
        self._arriving.wait()
        self._arriving = None
        if [param._version for param in self.params] != self._versions:
            raise ConfigurationError(
                "a parameter was changed in place between optimizer.step() and the next forward pass, while "
                "overlap_allgather=True was still gathering it; reach it by model.named_parameters() or param.data, "
                "which wait, or leave overlap_allgather out"
            )

    def take_changed_weights(self) -> None:
        """Take over parameters that other code has changed since the last step, in place or by `param.data = …`.

        Raises:
            ConfigurationError: if a parameter now has another shape or dtype.
        """
        for param, offset in () if self.sharded is not None else zip(self.params, self.offsets, strict=True):
            place = self.flat.data_ptr() + offset * self.flat.element_size()
            if param.numel() and param.data_ptr() != place:
                take_back(param, self.flat[offset : offset + param.numel()])
                self.shard.may_differ = True
        self.shard.take_changed_parameters()
        self.page_out_values()

    def page_out_values(self) -> None:
        """Let offloaded values of this rank's shard go until they are used again."""
        self.options.states.page_out(self.shard.values)
        if self.sharded is not None:
            self.sharded.page_out()

    def refresh_masters(self) -> None:
        """Copy the parameters' current values to the master weights (after weights were loaded)."""
        self.shard.read_parameters()
        self.page_out_values()

    def own_shard(self, flat: Tensor) -> Tensor:
        """Return this rank's range of a flat tensor over the bucket."""
        start = self.options.shard_index * self.shard_size
        return flat[start : start + self.shard_size]
