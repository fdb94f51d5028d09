"""HybridParallelOptimizer: the user's optimizer over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import failure
from booster.wrappers import OptimizerWrapper
from plugins.hybrid_parallel.debug.nonfinite import refuse_or_skip
from plugins.hybrid_parallel.debug.trace import StepTrace
from plugins.hybrid_parallel.loss_scale import LossScale
from plugins.hybrid_parallel.mesh import HybridMesh
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.exchange import PendingGather
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from shardformer.shard_spec import spec_of


class HybridParallelOptimizer(OptimizerWrapper):
    """The user's optimizer, its parameter groups and schedulers untouched, over this rank's shard of the state.

    Args:
        optim: the user's optimizer; its groups now hold pieces of parameters.
        buckets: where the parameters live.
        names: local parameter -> its Hugging Face name.
        reducer: brings gradients to the shards.
        loss_scale: the fp16 loss scale, or none.
        max_norm: clip the global gradient norm to this.
        nonfinite: "raise", "skip" or "ignore" steps whose gradients are nan or inf on any rank.
        trace: what is known of the passes of a step.
        mesh: the grid of ranks.
        overlap_allgather: leave the gathering of parameters running until the next forward pass.

    Attributes:
        aliases: name -> the other names of the same (tied) parameter.
        num_steps: calls of `step` so far, those before a checkpoint included.
        step_was_skipped: whether the last step had gradients that are not finite and was left out, on all ranks.
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
        trace: StepTrace,
        overlap_allgather: bool,
    ) -> None:
        super().__init__(optim)
        self.buckets, self.names, self.mesh = list(buckets), dict(names), mesh
        self.reducer, self.loss_scale, self.max_norm = reducer, loss_scale, max_norm
        self.nonfinite, self.trace, self.num_steps = nonfinite, trace, 0
        self.overlap_allgather = overlap_allgather
        self.aliases: Mapping[str, tuple[str, ...]] = {}
        self.after_step: Callable[[], None] | None = None  # in debug mode
        self._norm: Tensor | None = None
        self.step_was_skipped = False
        self._gathers: list[PendingGather] = []
        for index, group in enumerate(optim.param_groups):
            mine = (bucket for bucket in self.buckets if bucket.group_index == index)
            group["params"] = [piece.parameter for bucket in mine for piece in bucket.pieces]

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step, before clipping; None where none was computed."""
        return None if self._norm is None else float(self._norm)

    # ----- gradients -----

    @contextmanager
    def accepting_gradients(self) -> Iterator[None]:
        """Gradients of backward passes in this context are taken."""
        self.reducer.accepting = True
        try:
            yield
        finally:
            self.reducer.accepting = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; there is nothing to fill with zeros, so `set_to_none` changes nothing."""
        for bucket in self.buckets:
            bucket.clear_grads()

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
                    cut[self.names[param]] = (param, local / self.loss_scale.value)
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
            NonFiniteError: gradients are nan or inf, on all ranks alike; nothing was changed.
        """
        if closure is not None:
            raise RuntimeError("step(closure) is not supported; run the model before step()")
        if self.reducer.pending:
            self.reducer.finish()
        self.num_steps += 1
        self.trace.end_step()
        factor = self._gradient_factor()
        if self.step_was_skipped:
            return
        for bucket in self.buckets:
            bucket.assign_grads(factor)
        self._close_gathers()
        self.optim.step()
        self._gathers = [gather for bucket in self.buckets if (gather := bucket.publish()) is not None]
        if not self.overlap_allgather:
            self.wait_for_parameters()
            self._close_gathers()
        if self.after_step is not None:
            self.after_step()

    def wait_for_parameters(self) -> None:
        """Wait until the parameters of the last step are here."""
        for gather in self._gathers:
            gather.wait()

    def _close_gathers(self) -> None:
        """Wait until the others have what this rank is about to change."""
        for gather in self._gathers:
            gather.close()
        self._gathers = []

    def refresh_masters(self) -> None:
        """Take the parameters' present values as the optimizer's (after weights were loaded)."""
        for bucket in self.buckets:
            bucket.refresh_masters()

    def _gradient_factor(self) -> Tensor | float | None:
        """What gradients are multiplied by before the update: unscaling and clipping in one. Decides on skipping."""
        scale = self.loss_scale.value
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
        self.loss_scale.update(self.step_was_skipped)
        if not self.step_was_skipped:
            self.trace.accept()
        elif not scale_may_be_why:
            refuse_or_skip(self, self.trace, self.mesh)

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


def assemble(param: nn.Parameter, local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The full tensor of which `local` is this rank's piece, cut like `param`; on every rank of the axis."""
    spec = spec_of(param)
    if spec.dim is None:
        return local.clone()
    shapes = [spec.on_rank(rank).local_shape for rank in range(spec.world_size)]
    shards = [local.new_empty(shape) for shape in shapes]
    # Pieces may differ in size: one broadcast each.
    for rank, shard in enumerate(shards):
        if rank == spec.rank:
            shard.copy_(local)
        dist.broadcast(shard, group=group, group_src=rank)
    return spec.assemble(shards)
