"""HybridParallelOptimizer: the user's optimizer over shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster import failure
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import DP_CP
from plugins.hybrid_parallel.guards import GuardedOptimizer
from plugins.hybrid_parallel.loss.arithmetic import LossScale, clip_factor, gradient_factor, unscaled
from plugins.hybrid_parallel.zero.bucket import Bucket, resident
from plugins.hybrid_parallel.zero.bucket_layout import StateMemory, look_at
from plugins.hybrid_parallel.zero.collectives.backend import AllGatherHandle, ZeroCollectives
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers
from plugins.hybrid_parallel.zero.user_optimizer import (
    Stepper,
    UserGroups,
    load_state_dict,
    place_states,
    state_dict_of_pieces,
)
from plugins.hybrid_parallel.zero.whole_parameters import OwnedParameter, WholeParameters, full_gradients

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.zero.average import ShardedEMA


@contextmanager
def updating(optimizer: HybridParallelOptimizer, overlaps: bool = False) -> Iterator[None]:
    """Let the user's optimizer update; then all ranks have the values; `overlaps`: until the next forward."""
    for keep in optimizer.before_update:
        keep()
    optimizer.begin_update()
    optimizer.wholes.gather_values()
    yield
    optimizer.wholes.scatter_values()
    optimizer.wholes.release()
    optimizer.publish(overlaps)


def evaluation(optimizer: HybridParallelOptimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure for the user's optimizer, which runs `closure` with the weights as it has changed them by then.

    It may evaluate the closure as often as it likes: each time all ranks first get the present weights, and then the
    optimizer gets the gradients that the closure has left, and the loss that they belong to: the mean over replicas.
    """

    def evaluate() -> Any:
        with torch.no_grad():
            optimizer.wholes.scatter_values()
            optimizer.publish()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            optimizer.refuse_missed_pass()
            optimizer.take_gradients()
            optimizer.begin_update()
            optimizer.wholes.gather_gradients()
            return _mean(loss, optimizer.mesh.group(DP_CP))

    return evaluate


def _mean(loss: Any, group: ProcessGroup) -> Any:
    """Return the mean over ranks of a number or a 0-d tensor, the same on all of them."""
    size = dist.get_world_size(group)
    if size == 1 or not isinstance(loss, Tensor | float):
        return loss
    mean = torch.as_tensor(loss).detach().clone()
    dist.all_reduce(mean, group=group)
    mean /= size
    return mean if isinstance(loss, Tensor) else mean.item()


def check_closure(loss_scale: LossScale, nonfinite: str) -> None:
    """Refuse a closure if the step may have to be skipped: the optimizer may have changed weights before."""
    reason = "precision='fp16'" if loss_scale.watches_overflow else "nonfinite='skip'" if nonfinite == "skip" else None
    if reason is not None:
        raise ConfigurationError(
            f"optimizer.step(closure) cannot skip a step in the middle, as {reason} asks for; use precision='bf16' or "
            "'fp32' with nonfinite='raise', or run the model before optimizer.step()"
        )


def refuse_average(name: str | None) -> None:
    """Refuse to train on, save or load training states while the parameters have the values of an average."""
    if name is not None:
        raise ConfigurationError(
            f"the parameters have the values of the average {name!r} now; leave `with ema.applied():` before "
            "optimizer.step(), ema.update(), or saving or loading a checkpoint; save_model in it writes the average"
        )


class FrozenParameters:
    """Parameters of an optimizer that required no gradients when the model was boosted.

    Args:
        states: existing optimizer states of some of the parameters; removed from here when they are placed.
        gathers: what has sharded the parameters (ZeRO stage 3); None if they are whole.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        build_buckets: Callable[[Sequence[Sequence[nn.Parameter]]], list[Bucket]],
        states: dict[nn.Parameter, dict[str, Any]],
        gathers: ParameterGathers | None = None,
    ) -> None:
        self.groups, self.states = [list(group) for group in groups], states
        self._build_buckets, self._gathers = build_buckets, gathers

    def unfreeze(self, also: Collection[nn.Parameter] = ()) -> list[Bucket]:
        """Build buckets for the parameters that require gradients by now, and for those in `also`."""
        chosen = [[param for param in group if param.requires_grad or param in also] for group in self.groups]
        if not any(chosen):
            return []
        thawed = {param for group in chosen for param in group}
        if self._gathers is not None:
            self._gathers.dissolve(thawed)
        self.groups = [[param for param in group if param not in thawed] for group in self.groups]
        return self._build_buckets(chosen)


@dataclass(frozen=True)
class StepOptions:
    """Options of a step."""

    max_norm: float | None  # upper limit for the global gradient norm; None for no clipping
    nonfinite: str  # "raise", "skip" or "ignore" steps whose gradients are nan or inf on any rank
    overlap_allgather: bool  # whether the all-gather of parameters may run until the next forward pass
    # called on all ranks with the optimizer; raises, or reports why the step is skipped
    on_nonfinite: Callable[[HybridParallelOptimizer], None]
    # called on all ranks with the optimizer when the step is complete, or skipped
    after_step: Callable[[HybridParallelOptimizer], None]


@dataclass(frozen=True)
class LocalParameters:
    """The parameters of an optimizer on this rank."""

    names: Mapping[nn.Parameter, str]  # local parameter -> its Hugging Face name
    # the local parameters as the optimizer held them before, by group; None for those on other stages
    order: Sequence[Sequence[nn.Parameter | None]]
    frozen: FrozenParameters  # the parameters that have no bucket yet
    wholes: WholeParameters  # the parameters that the optimizer reads whole, although ranks hold parts of them
    group_names: Sequence[Sequence[str]] = ()  # names of the parameters of the whole model, by group


class HybridParallelOptimizer(GuardedOptimizer):
    """The user's optimizer, its parameter groups and schedulers untouched, over this rank's shard of the state.

    Args:
        optim: the user's optimizer; its groups now hold pieces of parameters.
        buckets: the buckets that hold the parameters.
        reducer: reduces gradients to the shards.
        parameters: the parameters that it updates.
        model: the model, all of whose optimizers share its mesh, trace and gathers.
        loss_scale: the model's fp16 loss scale, or a constant 1.
        options: options of a step.
        memory: where the states of the user's optimizer are.

    Attributes:
        num_steps: number of `step` calls so far, including those before a checkpoint.
        step_was_skipped: whether the last step was skipped, on all ranks, because gradients were not finite.
        has_missed_pass: whether a pass in training mode has left no gradients, because it was given no optimizer.
        group_names: names of the parameters of the whole model, by group.
        averages: averages of its parameters by name, see `ShardedEMA`.
        applied_average: name of the average whose values the parameters have now; None for their own.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        reducer: GradientReducer,
        parameters: LocalParameters,
        model: HybridParallelModel,
        loss_scale: LossScale,
        options: StepOptions,
        memory: StateMemory,
    ) -> None:
        super().__init__(optim)
        self.buckets, self.reducer = list(buckets), reducer
        self.names, self.aliases, self.frozen = dict(parameters.names), model.origin.aliases, parameters.frozen
        self.wholes, self.group_names = parameters.wholes, parameters.group_names
        self.mesh, self.loss_scale, self._gathers_of_model = model.mesh, loss_scale, model.gathers
        self.trace, self.peers = model.trace, model.optimizers  # including each one as soon as it is created
        self.options, self.num_steps = options, 0
        self._norm: Tensor | None = None
        self.before_update: list[Callable[[], None]] = []  # of readers of the weights, which then change
        self.step_was_skipped = self.has_missed_pass = False
        self._awaits_step = False  # whether a pass has left gradients since the last step
        self._accumulates = False  # whether a pass of this model is newer than the last step and zero_grad
        self._held_scale = 1.0  # factor that the present gradients are multiplied by
        self._gathers: list[AllGatherHandle] = []
        self.averages: dict[str, ShardedEMA] = {}
        self.applied_average: str | None = None
        self._order, self._groups = parameters.order, UserGroups(optim.param_groups, parameters.order, self.wholes)
        self._add_to_groups(self.buckets, self.wholes.owned)
        self.stepper = Stepper(optim, memory)
        self.stepper.take_states(self.updated)

    # ----- parameters -----

    @property
    def local_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters that it updates, or would if they were not frozen; its groups hold pieces of them."""
        return [param for group in self._order for param in group if param is not None]

    def take_unfrozen(self, also: Collection[str] = ()) -> None:
        """Take over frozen parameters that require gradients by now, and parameters with the given names.

        Must be called at a point that all ranks reach, with the same parameters; ranks do not communicate here.
        """
        buckets = self.frozen.unfreeze({param for param, name in self.names.items() if name in also} if also else ())
        if buckets:
            for exchange in dict.fromkeys(bucket.options.exchange for bucket in buckets):
                exchange.end_update()
            owned = self.wholes.add(buckets)
            self.wholes.take_states(self.frozen.states)
            place_states(self.optim, self.frozen.states, [*buckets, *owned])
            self.reducer.add(buckets)
            self.buckets = self.reducer.buckets
            self._add_to_groups(buckets, owned)
            self.stepper.take_states(self.updated)
            for average in self.averages.values():
                average.add(buckets)

    def _add_to_groups(self, buckets: Sequence[Bucket], owned: Sequence[OwnedParameter]) -> None:
        self.names |= {each.params[0]: self.names[each.local] for each in owned}
        self._groups.add(buckets, owned)

    @property
    def updated(self) -> list[Bucket | OwnedParameter]:
        """What the user's optimizer holds: buckets, whose pieces it may not all hold, and whole parameters."""
        return [*self.buckets, *self.wholes.owned]

    # ----- state dicts -----

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's pieces; `booster.save_optimizer` saves states for any layout."""
        return state_dict_of_pieces(self.optim, self.updated)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` on this rank, or the state dict of the optimizer before `boost`.

        Raises:
            ConfigurationError: if it belongs to another rank or layout, or to other parameter groups.
        """
        self.take_unfrozen()
        states = load_state_dict(self.optim, state_dict, self.updated, self._order, self.wholes)
        self.frozen.states.update(states)
        self.stepper.take_states(self.updated)

    # ----- gradients -----

    @contextmanager
    def accepting_gradients(self, scale: float | None = None) -> Iterator[None]:
        """Accept the gradients of backward passes in this context.

        Args:
            scale: factor that they are multiplied by; None for the loss scale.
        """
        self.take_unfrozen()
        self.loss_scale.update()
        self._hold_at(self.loss_scale.value if scale is None else scale)
        self._awaits_step = True
        self._accumulates |= scale is None  # a loss of another model, as of a GAN's generator, is for its optimizer
        self.reducer.accepting = True
        try:
            with self._gathers_of_model.running():
                yield
        finally:
            self.reducer.accepting = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; with `set_to_none=False`, zero them instead, as torch does."""
        self._accumulates = False
        for bucket in resident(self.buckets):
            bucket.clear_grads(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; return the norm before (0-d).

        Must be called on all ranks between the backward pass and `step`. It does what `torch.nn.utils.clip_grad_norm_`
        does to the parameters of this optimizer; `model.clip_grad_norm_` includes all optimizers.
        """
        return clip_grad_norm_([self], max_norm, norm_type)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the gradients to ±`clip_value`, as `torch.nn.utils.clip_grad_value_` does.

        Must be called on all ranks between the backward pass and `step`.
        """
        self.finish_gradients()
        for bucket in resident(self.buckets):
            bucket.clamp_grads(clip_value)

    def finish_gradients(self) -> None:
        """Reduce the gradients that `no_sync` has accumulated, and bring all gradients to scale 1."""
        if self.reducer.pending:
            self.reducer.finish()
        self._hold_at(1.0)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the whole, unscaled gradient of every parameter of this stage that has one, by Hugging Face name.

        Must be called on all ranks, after the backward pass and before `step`.
        """
        return full_gradients(self.buckets, self.names, self.mesh, self._held_scale)

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step, before clipping; None if it was not computed."""
        return None if self._norm is None else float(self._norm)

    def refuse_accumulated(self) -> None:
        """Refuse to move a training state between accumulated passes, since gradients are no part of it."""
        if self._accumulates:
            raise ConfigurationError(
                "the gradients since the last optimizer.step() are no part of a training state, and would be lost; "
                "save, or change the layout, after optimizer.step(), or after optimizer.zero_grad() drops them"
            )

    # ----- the step -----

    @failure.guard("optimizer.step")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale and clip gradients, update this rank's shard and all-gather the parameters.

        Args:
            closure: runs the model and returns the loss, for optimizers that evaluate it in their step. It calls
                `optimizer.zero_grad()` and `booster.backward` or `booster.execute_pipeline`, on all ranks.

        Returns:
            What the user's optimizer returns: the closure's loss, if it evaluates one, as a mean over replicas.

        Raises:
            NonFiniteError: gradients are nan or inf; raised on all ranks, before the optimizer reads them.
        """
        refuse_average(self.applied_average)
        if closure is not None:
            check_closure(self.loss_scale, self.options.nonfinite)
            self.has_missed_pass = False  # the closure is to leave gradients
        self.refuse_missed_pass()
        if not self.reducer.synchronises and self.mesh.size(DP_CP) > 1:
            raise ConfigurationError(
                "optimizer.step() inside of no_sync would train each replica by its own gradients, as LocalSGD does, "
                "and a layout keeps replicas equal; call it outside of no_sync, and leave LocalSGD out"
            )
        if self._groups.has_strangers():
            raise ConfigurationError(
                "optimizer.param_groups holds a parameter that was added after boost(); add it to the optimizer "
                "before, frozen by requires_grad=False until it is to be trained"
            )
        self.num_steps += 1
        for peer in self.peers:
            peer._accumulates = False
        self.take_gradients()
        result = None
        if not self.step_was_skipped:
            with updating(self, self.options.overlap_allgather):
                self.wholes.gather_gradients()
                result = self.stepper.step(self.updated, None if closure is None else evaluation(self, closure))
        self.options.after_step(self)
        return result

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._switch, found) if name in ("train", "eval") else found

    @torch.no_grad()
    def _switch(self, method: Callable[[], Any]) -> Any:
        """Run a method of the user's optimizer that changes weights (schedule-free optimizers)."""
        with updating(self):
            return method()

    def take_gradients(self) -> None:
        """Complete, unscale and clip the gradients since the last call, and assign them to the pieces."""
        if self.reducer.pending:
            self.reducer.finish()
        self.trace.end_step()
        self._gathers_of_model.end_step()
        factor = self._gradient_factor()
        if self.step_was_skipped:
            return
        for bucket in resident(self.buckets):
            bucket.assign_grads(factor)
        self._held_scale = 1.0

    def begin_update(self) -> None:
        """Wait until this rank may change the parameters, and take over changes by other code."""
        self._close_gathers()
        for exchange in self._shard_exchanges:
            exchange.begin_update()
        self.take_changed_weights()

    def publish(self, overlaps: bool = False) -> None:
        """Write updated values to the parameters of all ranks.

        Args:
            overlaps: whether to return before they are gathered.
        """
        gathers = [bucket.all_gather_params(overlaps) for bucket in resident(self.buckets)]
        self._gathers = [gather for gather in gathers if gather is not None]
        for exchange in self._shard_exchanges:
            exchange.end_update()
        if not overlaps:
            self.wait_for_parameters()
            self._close_gathers()

    def wait_for_parameters(self) -> None:
        """Wait until the parameters of the last step are gathered; refuse those that were changed in place before."""
        for bucket in self.buckets:
            bucket.arrive()
        for gather in self._gathers:
            gather.wait()

    def _close_gathers(self) -> None:
        """Wait until the other ranks have read the parameters that this rank is about to change."""
        for gather in self._gathers:
            gather.close()
        self._gathers = []

    def take_changed_weights(self) -> None:
        """Take over parameters that other code has changed since the last step."""
        refuse_average(self.applied_average)
        for bucket in resident(self.buckets):
            bucket.take_changed_weights()

    def refresh_masters(self) -> None:
        """Copy the parameters' current values to the master weights (after weights were loaded)."""
        refuse_average(self.applied_average)
        for bucket in resident(self.buckets):
            bucket.refresh_masters()

    def publish_masters(self) -> None:
        """Copy the master weights to the parameters of all ranks (after master weights were loaded)."""
        for exchange in self._shard_exchanges:
            exchange.begin_update()
        for bucket in resident(self.buckets):
            if bucket.has_masters and (gather := bucket.all_gather_params()) is not None:
                gather.close()
        for exchange in self._shard_exchanges:
            exchange.end_update()

    @property
    def _shard_exchanges(self) -> list[ZeroCollectives]:
        """The collectives that gather parameters from the shards of ranks under ZeRO stage 3."""
        return list(dict.fromkeys(bucket.options.exchange for bucket in self.buckets if bucket.sharded is not None))

    def _gradient_factor(self) -> Tensor | float | None:
        """Return the factor that unscales and clips gradients before the update; decide whether to skip the step."""
        looks = self.loss_scale.watches_overflow or self.options.nonfinite != "ignore"
        if looks or self.options.max_norm is not None:
            self._norm = unscaled(self.global_norm(), self._held_scale)
        if looks:
            self._decide(self._norm)
        return gradient_factor(self._held_scale, self._norm, self.options.max_norm)

    def _decide(self, norm: Tensor) -> None:
        """Decide from the norm, which all ranks have, and which is finite only if every gradient of every rank is."""
        # The one place in a step where the host waits for a GPU; `nonfinite="ignore"` leaves it out.
        self.step_was_skipped = not look_at(norm, [bucket.shard for bucket in self.buckets])
        scale_may_be_why = self.loss_scale.can_shrink
        self.loss_scale.record(self.step_was_skipped)
        if not any(peer._awaits_step for peer in self.peers):
            self.loss_scale.update()
        if not self.step_was_skipped:
            self.trace.accept()
        elif not scale_may_be_why:
            self.options.on_nonfinite(self)

    def _hold_at(self, scale: float) -> None:
        """Rescale the present gradients, so that the gradients of the next pass can be added to them."""
        if scale != self._held_scale:
            for bucket in resident(self.buckets):
                bucket.scale_grads(scale / self._held_scale)
        self._held_scale = scale

    def refuse_missed_pass(self) -> None:
        """Refuse a step, or the evaluation of a closure, whose pass has left no gradients."""
        missed, self.has_missed_pass = self.has_missed_pass, False
        awaited, self._awaits_step = self._awaits_step, False
        if missed and not awaited:
            raise ConfigurationError(
                "optimizer.step() finds no gradients, because booster.execute_pipeline ran without the optimizer, that "
                "is, to evaluate; call booster.execute_pipeline(batches, model, optimizer=optimizer) to train"
            )

    def global_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients, each parameter counted once over all axes (0-d, float64, loss-scaled).

        A copy that is not counted still makes the norm nan if it is not finite, since its own rank would be corrupted.
        """
        return self.reducer.global_norm(self.mesh.device, norm_type)


@failure.guard("model.clip_grad_norm_")
@torch.no_grad()
def clip_grad_norm_(optimizers: Sequence[HybridParallelOptimizer], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of several optimizers so that their joint norm is at most `max_norm`.

    Args:
        norm_type: the `p` of the p-norm, above 0; `inf` for the largest absolute value.

    Returns:
        The norm before scaling, 0-d, the same on every rank.

    Raises:
        ConfigurationError: if a norm is no number, or cannot be.
    """
    max_norm = _number("max_norm", max_norm, "of 0 or more", lambda value: value >= 0)
    norm_type = _number("norm_type", norm_type, "above 0, or inf for the largest gradient", lambda value: value > 0)
    for optimizer in optimizers:
        optimizer.finish_gradients()
    norm = torch.linalg.vector_norm(torch.stack([each.global_norm(norm_type) for each in optimizers]), norm_type)
    factor = clip_factor(norm, max_norm)
    for bucket in resident(bucket for optimizer in optimizers for bucket in optimizer.buckets):
        bucket.scale_grads(factor)
    return norm


def _number(name: str, value: Any, words: str, holds: Callable[[float], bool]) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not holds(number):
        raise ConfigurationError(f"clip_grad_norm_ got {name}={value!r}; use a number {words}")
    return number
