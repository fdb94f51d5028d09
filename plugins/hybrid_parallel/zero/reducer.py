"""GradientReducer: takes gradients from the backward pass, reduces them to their shards, and computes their norms."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import Counts, LossScale, norm_of, scaled, unscaled
from plugins.hybrid_parallel.pipeline.schedule import Action, Kind
from plugins.hybrid_parallel.zero.bucket import Bucket, resident
from plugins.hybrid_parallel.zero.bucket_layout import NATIVE_GRAD
from plugins.hybrid_parallel.zero.whole_parameters import assemble, gather_pieces
from shardformer.distributed.process_groups import world_group
from shardformer.distributed.random import SharedStream
from shardformer.matmul.kernel import GradBuffer, attach_grad_buffer
from shardformer.shard_spec import spec_of

Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
_STREAM = 0x5EED  # keeps the stream of random numbers in hooks apart from the streams of models


def global_norm(buckets: Sequence[Bucket], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all ranks' gradients (0-d, float64), each parameter once; all ranks must call it."""
    norm = norm_of_rank(buckets, device, norm_type)
    if dist.get_world_size() == 1:
        return norm
    if norm_type < math.inf:
        total = norm.pow(norm_type)
        dist.all_reduce(total, group=world_group())
        return total.pow(1.0 / norm_type)
    # The maximum of nan and a number is either, depending on the backend.
    largest = torch.stack([norm.nan_to_num(nan=math.inf, posinf=math.inf), norm.isnan().double()])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world_group())
    norm, is_nan = largest.unbind()
    return norm.masked_fill(is_nan > 0, math.nan)


def norm_of_rank(buckets: Sequence[Bucket], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """Return this rank's norm of counted gradients (0-d, float64); others that are not finite make it nan."""
    # A stage without trained parameters takes part on the mesh's device, too: each device has a backend of its own.
    if not buckets:
        return torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        bucket.clear_stale()
    # Not kept: user code may change the gradients in place.
    used = [bucket for bucket in buckets if bucket.used]
    known = {bucket: bucket.norm for bucket in used if bucket.norm is not None and norm_type == 2.0}
    unknown = [bucket for bucket in used if bucket not in known]
    norms = known | dict(zip(unknown, _norms(unknown, norm_type), strict=True))
    zero = torch.zeros((), dtype=torch.float64, device=buckets[0].flat.device) if len(norms) < len(buckets) else None
    together = torch.stack([norms.get(bucket, zero) for bucket in buckets])
    copies = [norm for norm, bucket in zip(together.unbind(), buckets, strict=True) if not bucket.counted]
    if copies:
        torch._foreach_mul_(copies, 0.0)
    return torch.linalg.vector_norm(together, norm_type)


def _norms(buckets: Sequence[Bucket], norm_type: float) -> Sequence[Tensor]:
    """Return the norm of each bucket's reduced gradients; of offloaded ones, without having all in memory."""
    if buckets and all(bucket.shard_grads.device.type != "cpu" for bucket in buckets):
        return torch._foreach_norm([bucket.shard_grads for bucket in buckets], norm_type, torch.float64)
    return [norm_of(bucket.shard_grads, norm_type).to(bucket.flat.device) for bucket in resident(buckets)]


class GradientHooks:
    """The user's gradient hooks on one optimizer's parameters, run on the gradients that plain torch would give them.

    In a backward pass a rank has only the gradients of its own samples, one micro-batch at a time, and only its shard
    of a sharded parameter. A hook that applies a mask would work on these, a clamp or a norm would not. So hooks are
    taken off the parameters when the model is boosted, and run once per pass on whole, reduced, unscaled gradients.

    Args:
        hooks: local parameter -> its hooks, as `take_hooks` returned them.
        names: local parameter -> its name, in the same order on every rank.
        seed: for random numbers drawn in hooks; the same on every rank, because ranks keep shards of one gradient.
    """

    def __init__(
        self,
        hooks: Mapping[nn.Parameter, Hooks],
        names: Mapping[nn.Parameter, str],
        mesh: HybridMesh,
        loss_scale: LossScale,
        seed: int,
    ) -> None:
        self._hooks, self._names, self._mesh, self._loss_scale = dict(hooks), names, mesh, loss_scale
        self._stream = SharedStream(seed + _STREAM) if dist.get_world_size() > 1 else None

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    @torch.no_grad()
    def run(self, buckets: Sequence[Bucket], used: Sequence[set[int]]) -> None:
        """Run the hooks on the reduced gradients of this pass, and store the gradients that they return.

        Must be called on all ranks, before gradients are added to the sum over earlier passes.

        Args:
            used: for each bucket, the indices of parameters that have a gradient.
        """
        # By name: tensor-parallel ranks sort their parameters into different buckets.
        for name, param, local, (bucket, index) in sorted(self._reduced(buckets, used), key=lambda item: item[0]):
            spec = spec_of(param)
            scale = self._loss_scale.value
            whole = unscaled(assemble(param, local, self._mesh.group(spec.axis)), scale)
            with nullcontext() if self._stream is None else self._stream.active():
                for hook in list(self._hooks[param].values()):
                    returned = hook(whole)
                    whole = whole if returned is None else returned
            if tuple(whole.shape) != spec.full_shape:
                raise ConfigurationError(
                    f"the gradient hook of {name} returned a tensor of shape {tuple(whole.shape)}; return one of the "
                    f"whole gradient's shape {spec.full_shape}"
                )
            bucket.replace_reduced(index, spec.shard(scaled(whole, scale)))

    def _reduced(
        self, buckets: Sequence[Bucket], used: Sequence[set[int]]
    ) -> Iterator[tuple[str, nn.Parameter, Tensor, tuple[Bucket, int]]]:
        """Yield name, parameter, local gradient and (bucket, index) for parameters with hooks and a gradient."""
        for bucket, indices in zip(buckets, used, strict=True):
            mine = [index for index in sorted(indices) if self._hooks.get(bucket.params[index])]
            if not mine:
                continue
            gathered = gather_pieces(bucket, bucket.reduced_pieces(mine), bucket.grad_dtype)
            for index in mine:
                param = bucket.params[index]
                yield self._names[param], param, gathered[index], (bucket, index)


def take_hooks(parameter: nn.Parameter) -> Hooks:
    """Take the hooks off a parameter and return them; handles that the user holds can still remove them."""
    hooks = parameter._backward_hooks or {}
    parameter._backward_hooks = None
    return hooks


def hooked_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters with gradient hooks, which all ranks must run together."""
    return [name for name, parameter in model.named_parameters() if parameter._backward_hooks]


# Number of launched reductions whose local gradients are kept: on a CPU, and on a GPU under ZeRO stages 2 and 3.
IN_FLIGHT = 2
# Buffers kept from step to step: those in flight, the one being written and the one being released. Buffers that have
# accumulated several passes are all kept: fresh pages for them would cost more than the reduction.
KEPT_BUFFERS = IN_FLIGHT + 2


class GradientReducer:
    """Accumulates gradients in buckets and reduces a bucket as soon as all of its gradients are complete.

    Buckets are reduced in their order, which is the same on all data-parallel ranks. A bucket that waits for an unused
    parameter is reduced at the end of the step, or of the pass under ZeRO stage 2, which reduces every pass by itself.

    Args:
        buckets: in the order in which the backward pass completes them.
        dp_group: the data-parallel ranks. They agree on used parameters, even if experts are reduced over some of them.
        overlap: whether to reduce while the backward pass runs.
        waits: whether a rank may wait for other ranks during the backward pass; it must not if they in turn wait for
            its activations, keys or tokens.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dp_group: ProcessGroup,
        overlap: bool,
        waits: bool = True,
        hooks: GradientHooks | None = None,
    ) -> None:
        self.buckets, self.dp_group, self.overlap, self.waits = list(buckets), dp_group, overlap, waits
        self.hooks = hooks
        self.accepting = False  # inside a backward pass that the library runs
        self.synchronises = True  # outside of no_sync
        self.counts: Counts | None = None  # of the losses of gradients that are pending; None for means
        self.is_reached = False  # whether a gradient has arrived since this was reset
        self.expects_none = False  # inside the backward pass of a loss of outputs that stages have computed
        self.arrival: dict[int, int] = {}  # id of a parameter -> its place in the first backward pass
        self._final = False  # inside the backward pass that completes the gradients
        self._complete: dict[Bucket, set[int]] = {}
        self._queue: list[Bucket] | None = None  # what this pass reduces, in order; None: what is left at the end
        self._next = 0
        self.attaches_grad_buffers = False  # whether matmuls may write gradients into buckets
        for bucket in self.buckets:
            self._connect(bucket)

    @property
    def pending(self) -> bool:
        """Whether there are local gradients that are not reduced yet."""
        return any(bucket.is_pending for bucket in self.buckets)

    @property
    def reduces_each_pass(self) -> bool:
        """Whether gradients are reduced after every pass (ZeRO stage 2); the same on all replicas."""
        return any(bucket.options.reduces_each_pass for bucket in self.buckets)

    def global_norm(self, device: torch.device, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the reduced gradients of all ranks (0-d, float64); see `grad_norm.global_norm`."""
        return global_norm(self.buckets, device, norm_type)

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets; tied ones stay last, and in the same order on all stages."""
        self.buckets = sorted([*self.buckets, *buckets], key=lambda bucket: bucket.tied_group is not None)
        for bucket in buckets:
            self._connect(bucket)

    def _connect(self, bucket: Bucket) -> None:
        self._complete[bucket] = set()
        for index, param in enumerate(bucket.params):
            trains = param.requires_grad
            param.requires_grad_()  # a frozen parameter accepts no new hook, but keeps existing ones
            Tensor.register_post_accumulate_grad_hook(param, self._hook(bucket, index))  # its own is refused
            param.requires_grad_(trains)
            if param.dim() == 2 and (param.is_cuda or param.dtype == bucket.grad_dtype):
                attach_grad_buffer(param, self._place(bucket, index))
                self.attaches_grad_buffers = True

    @contextmanager
    def expecting_none(self) -> Iterator[None]:
        """Refuse gradients in this context: stages compute them from those of their outputs."""
        self.expects_none = True
        try:
            yield
        finally:
            self.expects_none = False

    def begin_final_backward(self) -> None:
        """Mark the next backward pass as the one that completes the gradients."""
        self._final, self._queue = True, self.buckets

    def begin_backward(self, is_final: bool) -> None:
        """Mark the next backward pass as the only one of a batch; `is_final` tells whether it completes gradients."""
        if is_final:
            self.begin_final_backward()
        elif self.reduces_each_pass:
            self.begin_pass()

    def end_backward(self, is_final: bool) -> None:
        """Reduce what is complete after the backward pass of a loss."""
        if is_final:
            self.finish()
        elif self._queue is not None:
            self.end_pass()

    def begin_pass(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Mark the next backward pass as one that `end_pass` completes; `parameters`: that it may reach; None: all."""
        self._final, self._queue = True, self._of_pass(parameters)

    def end_pass(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Reduce the gradients of the passes since the last call, and keep their shards, with the earlier ones.

        Must be called on all replicas, with the same parameters, which may wait for each other here.
        """
        self._queue = self._of_pass(parameters) if self._queue is None else self._queue
        self.launch_rest()
        for bucket in resident(self._queue):
            bucket.add_pass()
            self._complete[bucket].clear()
        self._next, self._queue = 0, None
        for pool in {bucket.options.grad_buffers for bucket in self.buckets if bucket.options.reduces_each_pass}:
            pool.trim(KEPT_BUFFERS)

    def _of_pass(self, parameters: Collection[nn.Parameter] | None) -> list[Bucket]:
        return [
            bucket
            for bucket in self.buckets
            if bucket.options.reduces_each_pass
            and (parameters is None or any(each in parameters for each in bucket.params))
        ]

    def complete(self, parameters: Collection[nn.Parameter]) -> None:
        """Mark the gradients of these parameters as complete."""
        if self._queue is None:
            self._queue = self.buckets
        for bucket, done in self._complete.items():
            done.update(index for index, param in enumerate(bucket.params) if param in parameters)
        if self.overlap:
            self._launch_complete()

    def launch_rest(self) -> None:
        """Reduce the remaining buckets; a rank without samples must do so too, because the others wait for it."""
        self._final = False
        if self._queue is None:
            self._queue = [bucket for bucket in self.buckets if bucket.awaits_launch]
        while self._next < len(self._queue):
            self._launch_next()

    def finish(self, factor: Tensor | None = None) -> None:
        """Reduce what remains and wait; `factor`: on gradients since the last, 0-d; None for that of `counts`."""
        if self.counts is not None:
            factor, self.counts = self.counts.factor(), None
        self.launch_rest()
        self._next, self._queue = 0, None
        self._complete = {bucket: set() for bucket in self.buckets}
        # Only now: a replica that used every parameter has launched its buckets in the backward pass, and the
        # collectives of a group must run in the same order on all of its ranks.
        used, accumulated = self._agree_on_used(), any(bucket.adds for bucket in self.buckets)
        for bucket in resident(self.buckets):
            bucket.complete(factor)
        if self.hooks:
            self.hooks.run(self.buckets, used)
        for bucket, indices in zip(resident(self.buckets), used, strict=True):
            bucket.keep(indices)
        for pool in () if accumulated else {bucket.options.grad_buffers for bucket in self.buckets}:
            pool.trim(KEPT_BUFFERS)

    def settle(self) -> None:
        """Reduce pending gradients before those of another loss: a factor is on the gradients of one loss."""
        if self.pending:
            self.finish()
        self.counts = None

    # Weak references: strong ones form a cycle through the parameter's hooks that the collector cannot free.

    def _place(self, of_bucket: Bucket, index: int) -> GradBuffer:
        reference, bucket_reference = weakref.ref(self), weakref.ref(of_bucket)

        def place(dtype: torch.dtype) -> tuple[Tensor, bool] | None:
            reducer = reference()
            if reducer is None or not reducer.accepting:
                return None
            bucket = bucket_reference()
            param = bucket.params[index]
            # A user's hook must see the gradient of this pass, not the sum over passes. A parameter that was frozen
            # after the forward pass takes no gradient.
            is_watched = bool(param._backward_hooks) or not param.requires_grad
            if is_watched or dtype != (param.dtype if param.is_cuda else bucket.grad_dtype):
                return None
            found = bucket.borrow_grad_view(index)
            if found is not None and param.is_cuda:
                reducer.is_reached = True
                reducer.arrival.setdefault(id(param), len(reducer.arrival))
            return found

        return place

    def _hook(self, bucket: Bucket, index: int) -> Callable[[nn.Parameter], None]:
        reference, bucket_reference = weakref.ref(self), weakref.ref(bucket)

        # Runs for each parameter in each pass, so that it calls little.
        def take_gradient(param: nn.Parameter) -> None:
            reducer = reference()
            if reducer is None:
                return
            gradient = NATIVE_GRAD.__get__(param)
            NATIVE_GRAD.__set__(param, None)
            if not reducer.accepting or reducer.expects_none:
                raise reducer._unexpected()
            bucket = bucket_reference()
            if gradient is not None:
                bucket.accumulate(index, gradient, stays=True)
                reducer.is_reached = True
                reducer.arrival.setdefault(id(param), len(reducer.arrival))
            elif index not in bucket.written:  # the first half of a split backward pass defers it
                return
            # A pass within an accumulation completes the buckets of its queue alone: not those of experts on one rank.
            if reducer._final and reducer.overlap and (reducer._queue is reducer.buckets or bucket in reducer._queue):
                complete = reducer._complete[bucket]
                complete.add(index)
                if len(complete) == len(bucket.params):
                    reducer._launch_complete()

        return take_gradient

    def _unexpected(self) -> Exception:
        if not self.accepting:
            return RuntimeError(
                "call booster.backward(loss, optimizer) instead of loss.backward(), with what boost() returned: "
                "model, optimizer = booster.boost(model, optimizer)"
            )
        return ConfigurationError(
            "the loss reads a weight besides the model's outputs, and another pipeline stage may count it too; "
            "compute it from the model's outputs (a penalty on weights is the optimizer's weight_decay)"
        )

    def _launch_complete(self) -> None:
        while self._queue is not None and self._next < len(self._queue):
            bucket = self._queue[self._next]
            if len(self._complete[bucket]) < len(bucket.params):
                return
            self._launch_next()

    def _launch_next(self) -> None:
        queue = self._queue
        queue[self._next].launch()
        self._next += 1
        earlier = self._next - 1 - IN_FLIGHT
        # On a GPU the next kernels wait, too: only where no rank is to have the gradients of a whole pass in memory.
        if not self.waits or earlier < 0:
            return
        if queue[earlier].flat.device.type != "cpu" and not queue[earlier].options.reduces_each_pass:
            return
        queue[earlier].collect()
        queue[earlier].page_out()
        # Other ranks may still read the gradients of this bucket, but are unlikely to read those before it.
        if earlier > 0:
            queue[earlier - 1].release_local_grads()

    def _agree_on_used(self) -> list[set[int]]:
        """Return, per bucket, the parameters with a gradient on any rank that has them; others keep None.

        Besides replicas, ranks differ that have parts of sequences (one routes no token to an expert), and stages.
        """
        flags = [torch.zeros(len(bucket.params), dtype=torch.int32) for bucket in self.buckets]
        for bucket_flags, bucket in zip(flags, self.buckets, strict=True):
            bucket_flags[list(bucket.written | bucket.in_passes)] = 1
        groups: dict[ProcessGroup, list[Tensor]] = {self.dp_group: list(flags)}
        for are_stages in (False, True):  # in one order on all ranks
            for bucket_flags, bucket in zip(flags, self.buckets, strict=True):
                replicas = (self.dp_group, bucket.options.copy_group)
                for group in bucket.sum_groups:
                    if (group is bucket.tied_group) is are_stages and group not in replicas:
                        groups.setdefault(group, []).append(bucket_flags)
        for group, members in groups.items():
            if members and dist.get_world_size(group) > 1:
                # On the CPU even if gradients are on a GPU: reading the result must not wait for the device.
                together = torch.cat(members)
                dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
                for member, agreed in zip(members, together.split([len(each) for each in members]), strict=True):
                    member.copy_(agreed)
        return [set(each.nonzero().flatten().tolist()) for each in flags]


@contextmanager
def counting(
    reducers: Sequence[GradientReducer], others: Sequence[GradientReducer], count: Tensor | None
) -> Iterator[Counts | None]:
    """Run the backward pass of a loss in this context, after those whose gradients are pending.

    Args:
        others: of other models, which the loss may reach.
        count: count of the loss over all replicas, 0-d; None for a mean.

    Yields:
        Counts of the loss and of the pending ones; None for a mean.

    Raises:
        ConfigurationError: if the pending gradients are of another kind, or have counts of their own.
    """
    pending = [reducer for reducer in reducers if reducer.pending]
    if count is None:
        counts = None
    elif pending and pending[0].counts is not None:
        counts = pending[0].counts
        counts.add(count)
    else:
        counts = Counts(count)
    _refuse_other_counts(pending, counts)
    for reducer in (*reducers, *others):
        reducer.counts = reducer.counts if reducer.pending else counts
    mixed = [reducer for reducer in others if reducer.counts is not counts]
    for reducer in mixed:
        reducer.is_reached = False
    yield counts
    _refuse_other_counts([reducer for reducer in mixed if reducer.is_reached], counts)


def _refuse_other_counts(reducers: Sequence[GradientReducer], counts: Counts | None) -> None:
    if any(reducer.counts is not counts for reducer in reducers):
        raise ConfigurationError(
            "gradients of a mean and of (sum, count), or of two losses with counts of their own, would add up before "
            "they are reduced; within one no_sync give one of these forms, for one model"
        )


class BackwardPasses:
    """The backward passes of a batch on this rank's stages, as the reducers of a model's optimizers see them.

    Args:
        are_final: whether the passes complete the gradients of the step.
    """

    def __init__(
        self,
        reducers: Sequence[GradientReducer],
        parameters: Mapping[int, frozenset[nn.Parameter]],
        are_final: bool = True,
    ) -> None:
        self.reducers, self.parameters, self.are_final = reducers, parameters, are_final
        self._unfinished = set(parameters)  # stages whose gradients are not complete yet

    def before(self, action: Action, is_last: bool) -> None:
        """Prepare for a backward pass; `action`: the pass; `is_last`: whether it is the last one of its stage."""
        if action.kind is not Kind.BACKWARD:  # the second half of a split pass has no hooks
            return
        for reducer in self.reducers:
            if reducer.reduces_each_pass:
                reducer.begin_pass(self.parameters[action.stage])
            elif is_last and self.are_final and self._unfinished == {action.stage}:
                # Hooks then tell when each gradient is complete.
                reducer.begin_final_backward()

    def after(self, action: Action, is_last: bool) -> None:
        """Reduce what a backward pass has completed; see `before`."""
        if is_last:
            self._unfinished.discard(action.stage)
        for reducer in self.reducers:
            if reducer.reduces_each_pass:
                if action.kind is not Kind.BACKWARD_INPUT:
                    reducer.end_pass(self.parameters[action.stage])
            elif is_last and self.are_final and (self._unfinished or action.kind is not Kind.BACKWARD):
                reducer.complete(self._only_of(action.stage))

    def _only_of(self, stage: int) -> frozenset[nn.Parameter]:
        """Return the parameters of a stage that no unfinished stage has."""
        return self.parameters[stage].difference(*(self.parameters[other] for other in self._unfinished))
