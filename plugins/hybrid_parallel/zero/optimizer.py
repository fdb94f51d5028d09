"""HybridParallelOptimizer: the user's optimizer over shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import failure
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.guards import GuardedOptimizer
from plugins.hybrid_parallel.loss.loss_scale import LossScale
from plugins.hybrid_parallel.zero.assemble import assemble
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.comm.collectives import AllGatherHandle
from plugins.hybrid_parallel.zero.frozen import FrozenParameters
from plugins.hybrid_parallel.zero.grouping import place_states
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from plugins.hybrid_parallel.zero.state_dict import load_state_dict, state_dict_of_pieces
from shardformer.shard_spec import spec_of


class PassRecord(Protocol):
    """What is kept of the passes since the last step."""

    microbatches: Sequence[Mapping[str, Any]]

    def add_loss(self, loss: Tensor) -> None:
        """The loss of an ordinary loop's pass."""

    def end_step(self) -> None:
        """The optimizer takes its step."""

    def accept(self) -> None:
        """The gradients of the step are finite."""


class HybridParallelOptimizer(GuardedOptimizer):
    """The user's optimizer, its parameter groups and schedulers untouched, over this rank's shard of the state.

    Args:
        optim: the user's optimizer; its groups now hold pieces of parameters.
        buckets: where the parameters live.
        names: local parameter -> its Hugging Face name.
        reducer: brings gradients to the shards.
        loss_scale: the model's fp16 loss scale, or none.
        max_norm: clip the global gradient norm to this.
        nonfinite: "raise", "skip" or "ignore" steps whose gradients are nan or inf on any rank.
        trace: what is known of the passes of a step.
        on_nonfinite: raises, or says why the step is skipped; called on all ranks.
        mesh: the grid of ranks.
        overlap_allgather: leave the gathering of parameters running until the next forward pass.
        peers: all optimizers of the model, this one too as soon as it is made.
        frozen: the parameters that have no bucket yet.
        order: the local parameters as the optimizer held them before, by group; None for those of other stages.

    Attributes:
        aliases: name -> the other names of the same (tied) parameter.
        num_steps: calls of `step` so far, those before a checkpoint included.
        step_was_skipped: whether the last step had gradients that are not finite and was left out, on all ranks.
        has_missed_pass: whether a pass in training mode has left no gradients, because it was given no optimizer.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        names: Mapping[nn.Parameter, str],
        mesh: HybridMesh,
        reducer: GradientReducer,
        loss_scale: LossScale,
        max_norm: float | None,
        nonfinite: str,
        trace: PassRecord,
        on_nonfinite: Callable[[HybridParallelOptimizer], None],
        overlap_allgather: bool,
        peers: list[HybridParallelOptimizer],
        frozen: FrozenParameters,
        order: Sequence[Sequence[nn.Parameter | None]],
    ) -> None:
        super().__init__(optim)
        self.buckets, self.names, self.mesh = list(buckets), dict(names), mesh
        self.reducer, self.loss_scale, self.max_norm = reducer, loss_scale, max_norm
        self.nonfinite, self.trace, self.on_nonfinite = nonfinite, trace, on_nonfinite
        self.num_steps = 0
        self.overlap_allgather, self.peers, self.frozen = overlap_allgather, peers, frozen
        self.aliases: Mapping[str, tuple[str, ...]] = {}
        self.after_step: Callable[[], None] | None = None  # in debug mode
        self._norm: Tensor | None = None
        self.step_was_skipped = self.has_missed_pass = False
        self._awaits_step = False  # a pass has left gradients since the last step
        self._held_scale = 1.0  # what the gradients that are here are multiplied by
        self._gathers: list[AllGatherHandle] = []
        for group in optim.param_groups:
            group["params"] = []
        self._order, self._pieces = order, set[nn.Parameter]()
        self._add_to_groups(self.buckets)

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step, before clipping; None where none was computed."""
        return None if self._norm is None else float(self._norm)

    # ----- parameters -----

    def take_unfrozen(self, also: Collection[str] = ()) -> None:
        """Take over frozen parameters that take gradients by now, and those of the given names.

        To be called where all ranks come by: each does it by itself, and all to the same parameters.
        """
        buckets = self.frozen.unfreeze({param for param, name in self.names.items() if name in also} if also else ())
        if buckets:
            place_states(self.optim, self.frozen.states, buckets)
            self.reducer.add(buckets)
            self.buckets = self.reducer.buckets
            self._add_to_groups(buckets)

    def _add_to_groups(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            pieces = [piece.parameter for piece in bucket.pieces]
            self.param_groups[bucket.group_index]["params"] += pieces
            self._pieces.update(pieces)

    def _refuse_strangers(self) -> None:
        """Parameters that were put into a group by hand would be here without gradients."""
        if not self._pieces.issuperset(param for group in self.param_groups for param in group["params"]):
            raise ConfigurationError(
                "optimizer.param_groups holds a parameter that was added after boost(); add it to the optimizer "
                "before, frozen by requires_grad=False until it is to be trained"
            )

    # ----- state dicts -----

    def state_dict(self) -> dict[str, Any]:
        """The states of this rank's pieces, for `load_state_dict`; `booster.save_optimizer` is for any layout."""
        return state_dict_of_pieces(self.optim, self.buckets)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, or the state dict of the optimizer before `boost`.

        Raises:
            ConfigurationError: it is of another rank, layout or of other parameter groups.
        """
        self.take_unfrozen()
        self.frozen.states.update(load_state_dict(self.optim, state_dict, self.buckets, self._order))

    # ----- gradients -----

    @contextmanager
    def accepting_gradients(self, scale: float | None = None) -> Iterator[None]:
        """Gradients of backward passes in this context are taken.

        Args:
            scale: what they come multiplied by; None for the loss scale.
        """
        self.take_unfrozen()
        self.loss_scale.update()
        self._hold_at(self.loss_scale.value if scale is None else scale)
        self._awaits_step = True
        self.reducer.accepting = True
        try:
            yield
        finally:
            self.reducer.accepting = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or with `set_to_none=False` have zeros in their places, as torch."""
        for bucket in self.buckets:
            bucket.clear_grads(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; returns the norm before (0-d).

        To be called on all ranks between the backward pass and `step`: what `torch.nn.utils.clip_grad_norm_` does to
        the parameters of this optimizer. `model.clip_grad_norm_` is for those of all optimizers.
        """
        return clip_grad_norm_([self], max_norm)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the gradients to ±`clip_value`, as `torch.nn.utils.clip_grad_value_` does.

        To be called on all ranks between the backward pass and `step`.
        """
        self.finish_gradients()
        for bucket in self.buckets:
            bucket.clamp_grads(clip_value)

    def finish_gradients(self) -> None:
        """Reduce what `no_sync` has left, and bring all gradients to scale 1."""
        if self.reducer.pending:
            self.reducer.finish()
        self._hold_at(1.0)

    def full_gradients(self) -> dict[str, Tensor]:
        """The whole, unscaled gradient of every parameter of this stage that has one, by Hugging Face name.

        To be called on all ranks, after the backward pass and before `step`.
        """
        cut: dict[str, tuple[nn.Parameter, Tensor]] = {}
        for bucket in self.buckets:
            values = {piece.index: piece.view(bucket.shard_grads) for piece in bucket.pieces if bucket.used}
            for index, local in bucket.gather_pieces(values, bucket.grad_dtype).items():
                if index in bucket.used:
                    param = bucket.params[index]
                    cut[self.names[param]] = (param, local / self._held_scale)
        # By name: tensor-parallel ranks sort their parameters into other buckets.
        return {
            name: assemble(param, local, self.mesh.group(spec_of(param).axis))
            for name, (param, local) in sorted(cut.items())
        }

    # ----- the step -----

    @failure.guard("optimizer.step")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Unscale, clip, update this rank's shard and gather the parameters.

        Raises:
            RuntimeError: a closure was given, which would have to run the model by itself.
            ConfigurationError: `execute_pipeline` was not given the optimizer, so that there are no gradients.
            NonFiniteError: gradients are nan or inf, on all ranks alike; nothing was changed.
        """
        if closure is not None:
            raise RuntimeError("step(closure) is not supported; run the model before step()")
        self._refuse_missed_pass()
        self._refuse_strangers()
        if self.reducer.pending:
            self.reducer.finish()
        self.num_steps += 1
        self.trace.end_step()
        factor = self._gradient_factor()
        if self.step_was_skipped:
            return
        for bucket in self.buckets:
            bucket.assign_grads(factor)
        self._held_scale = 1.0
        self._close_gathers()
        self.take_changed_weights()
        self.optim.step()
        self._gathers = [
            gather
            for bucket in self.buckets
            if (gather := bucket.all_gather_params(self.overlap_allgather)) is not None
        ]
        if not self.overlap_allgather:
            self.wait_for_parameters()
            self._close_gathers()
        if self.after_step is not None:
            self.after_step()

    def wait_for_parameters(self) -> None:
        """Wait until the parameters of the last step are here.

        Raises:
            ConfigurationError: somebody has changed one in place before it was.
        """
        for bucket in self.buckets:
            bucket.arrive()
        for gather in self._gathers:
            gather.wait()

    def _close_gathers(self) -> None:
        """Wait until the others have what this rank is about to change."""
        for gather in self._gathers:
            gather.close()
        self._gathers = []

    def take_changed_weights(self) -> None:
        """Take over parameters that somebody else has changed since the last step."""
        for bucket in self.buckets:
            bucket.take_changed_weights()

    def refresh_masters(self) -> None:
        """Take the parameters' present values as the optimizer's (after weights were loaded)."""
        for bucket in self.buckets:
            bucket.refresh_masters()

    def publish_masters(self) -> None:
        """Have the parameters of all ranks take the optimizer's values (after these were loaded)."""
        for bucket in self.buckets:
            gather = bucket.all_gather_params() if bucket.has_masters else None
            if gather is not None:
                gather.close()

    def _gradient_factor(self) -> Tensor | float | None:
        """What gradients are multiplied by before the update: unscaling and clipping in one. Decides on skipping."""
        scale = self._held_scale
        unscale = None if scale == 1.0 else 1.0 / scale
        looks = self.loss_scale.watches_overflow or self.nonfinite != "ignore"
        if self.max_norm is None and not looks:
            return unscale
        norm = self._norm = self.global_norm() / scale
        if looks:
            self._decide(norm)
        if self.max_norm is None:
            return unscale
        clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return clip if unscale is None else clip * unscale

    def _decide(self, norm: Tensor) -> None:
        """All ranks have the same norm, which is finite only where every gradient of every rank is."""
        self.step_was_skipped = not torch.isfinite(norm).item()
        scale_may_be_why = self.loss_scale.can_shrink
        self.loss_scale.record(self.step_was_skipped)
        if not any(peer._awaits_step for peer in self.peers):
            self.loss_scale.update()
        if not self.step_was_skipped:
            self.trace.accept()
        elif not scale_may_be_why:
            self.on_nonfinite(self)

    def _hold_at(self, scale: float) -> None:
        """Bring the gradients that are here to another scale: those of the next pass are added to them."""
        if scale != self._held_scale:
            for bucket in self.buckets:
                bucket.scale_grads(scale / self._held_scale)
        self._held_scale = scale

    def _refuse_missed_pass(self) -> None:
        missed, self.has_missed_pass = self.has_missed_pass, False
        awaited, self._awaits_step = self._awaits_step, False
        if missed and not awaited:
            raise ConfigurationError(
                "optimizer.step() finds no gradients, because booster.execute_pipeline ran without the optimizer, that "
                "is, to evaluate; call booster.execute_pipeline(batches, model, optimizer=optimizer) to train"
            )

    def global_norm(self) -> Tensor:
        """Norm of all gradients, each parameter counted once over all axes (0-d, float64, scaled by the loss scale).

        A copy that is not counted still makes the norm nan where it is not finite: its rank would be the one to go bad.
        """
        counted = [bucket.squared_norm() * float(bucket.counted) for bucket in self.buckets]
        device = self.buckets[0].flat.device if self.buckets else "cpu"
        total = torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.float64, device=device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()


@contextmanager
def accepting_gradients(optimizers: Sequence[HybridParallelOptimizer], scale: float | None = None) -> Iterator[None]:
    """Gradients of backward passes in this context are taken by several optimizers."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.accepting_gradients(scale))
        yield


@torch.no_grad()
def clip_grad_norm_(optimizers: Sequence[HybridParallelOptimizer], max_norm: float) -> Tensor:
    """Scale the gradients of several optimizers so that the norm of all together is at most `max_norm`.

    Returns:
        The norm before, 0-d, the same on every rank.
    """
    for optimizer in optimizers:
        optimizer.finish_gradients()
    norm = torch.linalg.vector_norm(torch.stack([optimizer.global_norm() for optimizer in optimizers]))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for bucket in (bucket for optimizer in optimizers for bucket in optimizer.buckets):
        bucket.scale_grads(factor)
    return norm
