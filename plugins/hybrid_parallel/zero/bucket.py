"""Bucket: parameters that are stored, reduced and updated together in flat memory.

The parameters become views of one flat buffer. Gradients are accumulated in another, in at least fp32, and are
reduced over the data-parallel ranks in one collective: reduce-scattered under ZeRO stage 1 (Rajbhandari et al., arXiv
1910.02054), all-reduced under stage 0. The part of the result that a rank keeps is its shard. Under stage 2 every pass
is reduced by itself, and its shard is added to that of the passes before. The optimizer sees the
shard as pieces of parameters, so that states and skipped updates remain per parameter.

On a GPU a gradient waits for others, and all of them are copied at one time: a launch for each parameter would take the
host longer than the copies take the GPU. Whoever reads `flat_grads` finds them there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.loss.arithmetic import norm_of
from plugins.hybrid_parallel.zero import bucket_layout
from plugins.hybrid_parallel.zero.bucket_layout import (
    BucketOptions,
    BucketSlice,
    FreshBuffers,
    GradBufferPool,
    OptimizerShard,
    Source,
    show_grad,
)
from plugins.hybrid_parallel.zero.collectives.backend import AllGatherHandle, ReduceScatterHandle
from plugins.hybrid_parallel.zero.stage3 import kind_of

_MOST_WAITING = 16 * 2**20  # elements


def zero(tensors: Sequence[Tensor]) -> None:
    """Zero the tensors, on a GPU by one kernel."""
    if tensors:
        torch._foreach_zero_(tensors)


def resident(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Yield buckets one after the other; what is offloaded of each is in memory only while it is its turn."""
    for bucket in buckets:
        yield bucket
        bucket.page_out()


class Bucket:
    """Parameters of one dtype, one parameter group and one way of summing gradients.

    Args:
        sum_groups: further groups over which the gradients are partial sums (copies of the shard, tensor-parallel,
            tied stages).
        counted: whether this rank counts these parameters in the global norm.
        initial: sources of the full-precision values of parameters; used ones are removed, others have their values.
        tied_group: the member of `sum_groups` whose ranks are pipeline stages with the same parameters, or None.
        shards_parameters: whether ranks keep only their shard of the parameters (ZeRO stage 3).

    Attributes:
        sharded: the parameters, if ranks keep only their shard of them.
        written: indices of parameters with local gradients that are not reduced yet.
        in_passes: indices of parameters with gradients in passes that were reduced by themselves.
        launched: whether the reduction of this step's gradients has started.
        norm: Euclidean, of the shard of the reduced gradients (0-d, float64); None if it is not known.
        is_shown: whether user code may hold views of the reduced gradients.
        memory, results: memory of local gradients, and of reductions to shards.
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
        self.params, self.options, self.group_index = list(params), options, group_index
        self.sum_groups, self.counted, self.tied_group = list(sum_groups), counted, tied_group
        sizes = [param.numel() for param in params]
        self.offsets, size = bucket_layout.places_in_bucket(sizes, options.num_shards, options.whole_parameters)
        self._gaps = bucket_layout.gaps_between(self.offsets, sizes, size)
        self._strides = [torch.empty(param.shape, device="meta").stride() for param in params]
        self.shard_size = size // options.num_shards
        dtype, device = params[0].dtype, params[0].device
        self.grad_dtype = torch.promote_types(dtype, torch.float32)
        sources = [bucket_layout.take_source(param, initial) for param in params]
        self._flat = self.sharded = None
        if shards_parameters:
            self.sharded = kind_of(params[0])(self.params, self.offsets, size, options)
        else:
            self._flat = options.exchange.empty(size, dtype=dtype, device=device).zero_()
            bucket_layout.move_into(self._flat, self.params, self.offsets)
        for index, param in enumerate(self.params):
            show_grad(param, self, index)
        updated = self.grad_dtype if options.master_weights else dtype
        own = self.sharded.shard if shards_parameters else self.own_shard(self._flat)
        self.shard = OptimizerShard(own, updated, options.shard_index * self.shard_size, options.states)
        self.shard.add_pieces(self.params, self.offsets, sources)
        if shards_parameters:
            self.shard.write_parameters()
        self._arriving: AllGatherHandle | None = None  # all-gather of parameters that have not been used since
        self._versions: list[int] = []

        # Allocated on the first gradient. If gradients are sharded, freed after their reduction.
        is_offloaded = options.states.is_offloaded and device.type == "cpu"  # those of a GPU move when they are reduced
        unshared = GradBufferPool(options.states if is_offloaded else options.exchange)
        self.memory = options.grad_buffers if options.num_shards > 1 else unshared
        self.results = GradBufferPool(options.states) if is_offloaded else FreshBuffers()
        self._flat_grads: Tensor | None = None
        self.shard_grads: Tensor | None = None
        self.written, self.used, self.in_passes = set[int](), set[int](), set[int]()
        self.adds = self.is_shown = self.launched = False
        self.norm: Tensor | None = None
        self._lent: set[int] = set()  # parameters whose slots were handed to a matmul to write gradients to
        self._stale: set[int] = set()  # parameters with dropped gradients whose values are still in the shard
        self._waiting: dict[int, tuple[Tensor, bool]] = {}  # not in `_flat_grads` yet; are those of earlier passes?
        self._num_waiting, self._work = 0, None
        self._forget_views()
        # Whether later steps have their gradients in the same memory. On CPUs autograd takes over views that are new.
        self._keeps_pieces = options.num_shards == 1 and not options.states.is_offloaded and self.sum_dtype is None
        self._keeps_views = self._keeps_pieces and params[0].is_cuda
        self._pending: ReduceScatterHandle | None = None
        self._result: Tensor | None = None
        self._sum_of_passes: Tensor | None = None  # shard of the passes that were reduced since the last `keep`
        self.page_out()

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

    # ----- accumulation of the gradients of passes -----

    @property
    def flat_grads(self) -> Tensor | None:
        """The local gradients of all parameters, while this rank has them."""
        if self._waiting:
            self._take_waiting()
        return self._flat_grads

    @flat_grads.setter
    def flat_grads(self, value: Tensor | None) -> None:
        self._flat_grads = value

    def accumulate(self, index: int, grad: Tensor, stays: bool = False) -> None:
        """Add a local gradient to the bucket; `stays`: whether no other code changes `grad` later."""
        if self.launched:
            raise RuntimeError("a gradient arrived after its bucket was reduced; run the backward pass once a step")
        if index in self._lent:
            self._lent.discard(index)
            self.written.add(index)
            flat = self._flat_grads
            if grad.data_ptr() != flat.data_ptr() + self.offsets[index] * flat.element_size():
                self._grad_view(index).copy_(grad)  # autograd has summed it with other gradients
        elif stays and grad.is_cuda:
            self._wait_for_others(index, grad)
        elif index in self.written:
            self.adds = True
            self._grad_view(index).add_(grad)
        else:
            self._grad_view(index).copy_(grad)
            self.written.add(index)

    def borrow_grad_view(self, index: int) -> tuple[Tensor, bool] | None:
        """Return the slot for the next gradient and whether to add to it; None if `accumulate` must copy it.

        On a GPU the gradient is not given to `accumulate` later, so that other uses of the parameter add theirs.
        """
        if self.launched or index in self._lent:
            return None
        if self._flat_grads is None:
            self._provide_flat_grads()
        view, adds = self._grad_view(index), index in self.written
        self.adds = self.adds or adds
        (self.written if view.is_cuda else self._lent).add(index)
        return view, adds

    def forget_waiting(self) -> None:
        """Drop the gradients that are not in the flat tensor yet."""
        self._waiting.clear()
        self._num_waiting = 0

    def _wait_for_others(self, index: int, grad: Tensor) -> None:
        if index in self._waiting:
            self._take_waiting()
        self._waiting[index] = grad, index in self.written
        self.adds = self.adds or index in self.written
        self.written.add(index)
        self._num_waiting += grad.numel()
        if self._num_waiting >= _MOST_WAITING:
            self._take_waiting()

    def _take_waiting(self) -> None:
        waiting = dict(self._waiting)
        self.forget_waiting()
        for adds, take in ((False, torch._foreach_copy_), (True, bucket_layout.add_together)):
            chosen = {index: grad for index, (grad, is_added) in waiting.items() if is_added is adds}
            if chosen:
                take([self._grad_view(index) for index in chosen], list(chosen.values()))

    def _provide_flat_grads(self) -> None:
        if self._flat_grads is None and not self.used and self.options.num_shards == 1:
            # The gradients of the last step were cleared: reuse their memory.
            self._flat_grads, self.shard_grads = self.shard_grads, None
        if self._flat_grads is None:
            dtype = self.sum_dtype or self.grad_dtype
            self._flat_grads = self.memory.take(self.flat.numel(), dtype, self.flat.device)
            # The norm includes the gaps between parameters.
            zero([self._flat_grads[start:stop] for start, stop in self._gaps])

    def _grad_view(self, index: int) -> Tensor:
        # What is called for each parameter in each pass costs the host: few functions, and one operator for a view.
        if index in self._waiting:
            self._take_waiting()
        if self._flat_grads is None:
            self._provide_flat_grads()
        flat = self._flat_grads
        if self._keeps_views and self._viewed is not flat:
            self._viewed, self._views = flat, {}
        view = self._views.get(index)
        if view is None:
            place = self.offsets[index] + flat.storage_offset()
            view = flat.as_strided(self.params[index].shape, self._strides[index], place)
            if self._keeps_views:
                self._views[index] = view
        return view

    def _views_of_pieces(self, grads: Tensor) -> list[Tensor]:
        """Return the gradient of each piece, given the shard of them; the same views in each step if that can be."""
        if self._pieces_viewed is not grads:
            views = [piece.view(grads).view_as(piece.parameter) for piece in self.pieces]
            if not self._keeps_pieces or grads is not self.shard_grads:
                return views
            self._pieces_viewed, self._piece_views = grads, views
        return self._piece_views

    def _forget_views(self) -> None:
        self._viewed: Tensor | None = None  # the tensor that `_views` are views of
        self._pieces_viewed: Tensor | None = None
        self._views, self._piece_views = dict[int, Tensor](), list[Tensor]()

    # ----- reduction over the data-parallel ranks -----

    def launch(self) -> None:
        """Start the reduction over the data-parallel ranks."""
        self.launched = True
        if self._flat_grads is None:
            self._provide_flat_grads()
        zero([self._grad_view(index) for index in range(len(self.params)) if index not in self.written])
        if self.options.num_shards == 1:
            self._result = self.flat_grads
            if self.options.zero_stage == 0 and dist.get_world_size(self.options.dp_group) > 1:
                self._work = dist.all_reduce(self._result, group=self.options.dp_group, async_op=True)
        else:
            result = self.results.take(self.shard_size, self.sum_dtype or self.grad_dtype, self.flat.device)
            self._pending = self.options.exchange.reduce_scatter(self.flat_grads, result)

    def collect(self) -> None:
        """Wait for the result of the reduction."""
        if self._work is not None:
            self._work.wait()
        if self._pending is None or self._result is not None:
            return
        self._result = self._pending.wait()
        if self.flat.device.type != "cpu":  # read with the norms of the other buckets, in fewer kernels
            self._pending.mark_done(None)
            return
        self.norm = norm_of(self._result)
        self._pending.mark_done(math.isfinite(self.norm))

    def release_local_grads(self) -> None:
        """Free the local gradients once no rank reads them, unless a report on non-finite values may need them."""
        if self._pending is None:
            return
        self.collect()
        is_finite = self._pending.wait_all_done()
        self._pending = None
        # On a GPU no rank knows: the gradients of all buckets are in memory here anyway, and stay until `assign_grads`,
        # except where each pass is reduced so that no rank keeps whole gradients. A report names the sum then.
        keeps = self.options.keeps_local and not self.options.reduces_each_pass
        if is_finite or (is_finite is None and not keeps):
            self.give_local_grads()

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
        self.launched = False

    def complete(self, factor: Tensor | None) -> None:
        """Complete the reduction; `factor`: factor on this step's gradients; None for no scaling."""
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

    def keep(self, used: set[int]) -> None:
        """Add the reduction's result to the shard; `used`: indices of parameters with a gradient on any rank."""
        self.clear_stale()
        if self.options.states.is_offloaded and self.flat.device.type != "cpu":
            self._keep_on_host()
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
        self.launched = False

    def _keep_on_host(self) -> None:
        """Add the result of the reduction on a GPU to the shard in host memory."""
        result = self._result
        if self.used:
            self.norm = None
            self.shard_grads.add_(result.cpu())
            return
        self.norm = norm_of(result)
        if self.shard_grads is None:
            self.shard_grads = self.options.states.empty(len(result), result.dtype, result.device)
        self.shard_grads.copy_(result)

    # ----- the optimizer's view -----

    def assign_grads(self, factor: Tensor | float | None) -> None:
        """Assign pieces their gradients times `factor`, None where unused, and free the local gradients."""
        if self.options.num_shards > 1 and self.flat_grads is not None and not self.written:
            self.give_local_grads()
        if factor is not None:
            self.scale_grads(factor)
        views = self._views_of_pieces(self.shard_grads.to(self.shard.values)) if self.used else ()
        for place, piece in enumerate(self.pieces):
            piece.parameter.grad = views[place] if piece.index in self.used else None

    def all_gather_params(self, overlaps: bool = False) -> AllGatherHandle | None:
        """Write updated values to the parameters of all ranks; return the all-gather, None if there is one shard.

        Args:
            overlaps: whether the following code does not wait until it uses the parameters.
        """
        self.shard.write_parameters()
        if self.options.num_shards == 1 or self.sharded is not None:
            return None
        gather = self.options.exchange.all_gather(self.flat, is_copied=overlaps)
        if overlaps:
            self._arriving, self._versions = gather, [param._version for param in self.params]
        return gather

    def arrive(self) -> None:
        """Wait for the parameters of the last step."""
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
        """Take over parameters that other code has changed, in place or by `param.data = …`, in shape and dtype."""
        if self.sharded is None:
            flat, start, size = self._flat, self._flat.data_ptr(), self._flat.element_size()
            for param, offset in zip(self.params, self.offsets, strict=True):
                if param.data_ptr() != start + offset * size and param.numel():
                    bucket_layout.take_back(param, flat[offset : offset + param.numel()])
                    self.shard.may_differ = True
        self.shard.take_changed_parameters()

    def refresh_masters(self) -> None:
        """Copy the parameters' current values to the master weights (after weights were loaded)."""
        self.shard.read_parameters()

    def own_shard(self, flat: Tensor) -> Tensor:
        """Return this rank's range of a flat tensor over the bucket."""
        start = self.options.shard_index * self.shard_size
        return flat[start : start + self.shard_size]

    # ----- what user code does to gradients between the backward pass and the step -----

    def scale_grads(self, factor: Tensor | float) -> None:
        """Multiply all existing gradients, reduced or not, by `factor`."""
        for reduced in (self.shard_grads if self.used else None, self._sum_of_passes):
            if reduced is not None:
                self.norm = None
                reduced.mul_(factor if isinstance(factor, float) else factor.to(reduced))
        if self.written:
            factor = factor if isinstance(factor, float) else factor.to(self.flat_grads.dtype)
            torch._foreach_mul_([self._grad_view(index) for index in self.written], factor)

    def clamp_grads(self, limit: float) -> None:
        """Clamp every element of the reduced gradients to ±`limit`."""
        if self.used:
            self.norm = None
            self.shard_grads.clamp_(-limit, limit)

    def has_grad(self, index: int) -> bool:
        """Return whether a parameter has a gradient, reduced or not."""
        return index in self.used or index in self.written or index in self.in_passes

    def reduced_grad(self, index: int) -> Tensor:
        """Return a view of a gradient that this rank has whole; the caller may read, change and keep it."""
        self.is_shown = True
        param, offset = self.params[index], self.offsets[index]
        return self.shard_grads[offset : offset + param.numel()].view(param.shape)

    def set_grad(self, index: int, value: Tensor) -> None:
        """Set a gradient that this rank has whole."""
        if not self.used:
            self.drop_grads()
            self._provide_flat_grads()
            self.shard_grads = torch.zeros_like(self.flat_grads, dtype=self.grad_dtype)
        self._stale.discard(index)
        self.used.add(index)
        self.reduced_grad(index).copy_(value)

    def reduced_pieces(self, indices: Collection[int]) -> dict[int, Tensor]:
        """Return this rank's pieces of reduced gradients before `keep`, by parameter index."""
        return {piece.index: piece.view(self._result) for piece in self.pieces if piece.index in indices}

    def replace_reduced(self, index: int, local: Tensor) -> None:
        """Replace a reduced gradient by `local`, which has the parameter's shape."""
        for piece in self.pieces:
            if piece.index == index:
                piece.view(self._result).copy_(local.reshape(-1)[piece.start : piece.stop])
        self.norm = None

    def forget_grad(self, index: int) -> None:
        """Drop one gradient; existing views keep their values."""
        self.norm = None
        self.written.discard(index)
        if index in self.in_passes:
            self.in_passes.discard(index)
            zero([piece.view(self._sum_of_passes) for piece in self.pieces if piece.index == index])
        if index in self.used:
            self.used.discard(index)
            self._stale.add(index)
        if not self.used and self.is_shown:
            self.drop_grads()

    def local_grads(self) -> dict[int, Tensor] | None:
        """Return this rank's input to the last reduction by parameter index; None if it is overwritten or freed."""
        if self.options.num_shards == 1 or self.flat_grads is None:
            return None
        return {index: self._grad_view(index) for index in range(len(self.params))}

    def give_local_grads(self) -> None:
        """Give the memory of the local gradients back to the pool."""
        self.memory.give(self.flat_grads)
        self.flat_grads = None

    def clear_grads(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set existing ones to zero, which still move parameters by momentum and decay."""
        if not set_to_none:
            if self.used:
                self.shard_grads.zero_()
            zero([self._grad_view(index) for index in self.written])
            if self._sum_of_passes is not None:
                self._sum_of_passes.zero_()
            self.norm = None
            return
        self.forget_waiting()
        if self.options.num_shards > 1 or self.is_shown:
            self.drop_grads()  # the activations of the next forward pass can use the memory
        if self.options.num_shards > 1 and self.flat_grads is not None and not self.launched:
            self.give_local_grads()
        if self._sum_of_passes is not None:
            self.results.give(self._sum_of_passes)
        self._sum_of_passes = None
        for indices in (self._stale, self.written, self.in_passes, self._lent, self.used):
            indices.clear()
        for piece in self.pieces:
            piece.parameter.grad = None

    # ----- memory -----

    def page_out(self) -> None:
        """Let offloaded values and gradients of this rank go until they are used again; see `resident`."""
        for tensor in (self.shard.values, self.shard_grads, self._sum_of_passes, self._result, self._flat_grads):
            if tensor is not None:
                self.options.states.page_out(tensor)
        if self.sharded is not None:
            self.sharded.page_out()

    def drop_grads(self) -> None:
        """Release the memory of the reduced gradients, without reusing it if user code may still read it."""
        if self.shard_grads is not None and self.options.num_shards > 1 and not self.is_shown:
            self.results.give(self.shard_grads)
        elif self.shard_grads is not None:
            self.memory.leave(self.shard_grads)
        self.shard_grads, self.is_shown = None, False
        self._forget_views()
        self._stale.clear()

    def clear_stale(self) -> None:
        """Zero the slots of dropped gradients, because later gradients are added there and the norm includes them."""
        if not self._stale or not self.used:
            return
        if self.is_shown:
            left, self.shard_grads, self.is_shown = self.shard_grads, self.shard_grads.clone(), False
            self.memory.leave(left)
        zero([piece.view(self.shard_grads) for piece in self.pieces if piece.index in self._stale])
        self._stale.clear()
