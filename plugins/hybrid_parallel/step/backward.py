"""`booster.backward`: the backward pass of a loss that the script computes, of the outputs of any boosted models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.data.checks import FIRST_STEPS, ReplicaCheck, check_kind, check_loss
from plugins.hybrid_parallel.distributed.agreement import naming_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.guards import LabelCounts, check_weights_in_loss
from plugins.hybrid_parallel.loss.arithmetic import (
    LossKind,
    loss_and_count,
    mean_over_replicas,
    over_replicas,
    share_of_counted,
)
from plugins.hybrid_parallel.step.user_loop import agree
from plugins.hybrid_parallel.zero.reducer import counting

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.reproducible.feature import Units
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer


class LossBackward:
    """Backward passes of the losses that a script computes.

    Args:
        first_batches: compares the batches of replicas in the first steps.
    """

    def __init__(self, grid: HybridMesh, config: HybridParallelConfig, first_batches: ReplicaCheck) -> None:
        self.grid, self.config, self.first_batches = grid, config, first_batches
        self.labels = LabelCounts(grid)

    def run(
        self,
        loss: Tensor | tuple[Tensor, Any],
        optimizer: HybridParallelOptimizer,
        by_rows: bool,
        models: Sequence[HybridParallelModel],
    ) -> None:
        """Compute the gradients of `loss`, see `Booster.backward`; reduce them outside of `no_sync`."""
        loss, count = loss_and_count(loss)
        kind = LossKind.SUM if count is not None else LossKind.MEAN_OF_ROWS if by_rows else LossKind.MEAN_OF_REPLICAS
        trained = [model for model in models if optimizer in model.optimizers]
        others = [each for model in models if model not in trained for each in model.optimizers]
        # Gradient hooks run once per pass, as in plain torch, so each pass is reduced by itself.
        is_asked = all(model.require_backward_grad_sync for model in models)
        synchronises = is_asked or any(each.reducer.hooks for each in optimizer.peers)
        self._check(loss, count, kind, optimizer, is_asked, synchronises, trained[0].units if trained else None)
        if kind is LossKind.MEAN_OF_ROWS and synchronises:
            self.labels.compare(loss, trained[0].user_loop)
        count = None if count is None else over_replicas(count, self.grid)
        with ExitStack() as stack:
            stack.enter_context(naming_ranks())
            for model in trained:
                model.synchrony.run_if_due(model.optimizers)
            for each in optimizer.peers:
                stack.enter_context(each.accepting_gradients())
            for each in others:
                stack.enter_context(each.accepting_gradients(optimizer.loss_scale.value))
            reducers, of_others = ([each.reducer for each in every] for every in (optimizer.peers, others))
            counts = stack.enter_context(counting(reducers, of_others, count))
            for model in models:
                stack.enter_context(model.user_loop.losses.of(kind))
            if counts is None:
                share = mean_over_replicas(loss, self.grid.size(DP_CP), optimizer.loss_scale.value)
            else:
                share = share_of_counted(loss, counts.divisor, optimizer.loss_scale.value)
            optimizer.trace.add_loss(loss.detach())
            if self.config.runs_parts:
                self._run_through_stages(share, optimizer, others, models, synchronises)
            else:
                for reducer in reducers:
                    reducer.begin_backward(is_final=synchronises)
                share.backward()
            for reducer in (*reducers, *(each for each in of_others if each.pending)):
                reducer.end_backward(is_final=synchronises)
        if synchronises and optimizer.trace.microbatches:
            self.first_batches.compare(optimizer.trace.microbatches[-1])

    def _run_through_stages(
        self,
        share: Tensor,
        optimizer: HybridParallelOptimizer,
        others: Sequence[HybridParallelOptimizer],
        models: Sequence[HybridParallelModel],
        synchronises: bool,
    ) -> None:
        """Run the pass of the loss; then, for the outputs that it has reached, those of the parts of their batches."""
        with ExitStack() as of_outputs:
            for each in (*optimizer.peers, *others):
                of_outputs.enter_context(each.reducer.expecting_none())
            share.backward()
        for model in models:
            if model.user_loop.pending or optimizer in model.optimizers:
                model.user_loop.backward(synchronises and optimizer in model.optimizers)

    def _check(
        self,
        loss: Tensor,
        count: Any,
        kind: LossKind,
        optimizer: HybridParallelOptimizer,
        is_asked: bool,
        synchronises: bool,
        units: Units | None,
    ) -> None:
        """Refuse a loss that ranks do not share, or whose gradients would not be those of the global batch."""
        if self.grid.size("pp") > 1:
            agree(self.grid, f"calls booster.backward with {kind.value}")
        if self.grid.size("tp") > 1:
            check_weights_in_loss(loss)
        if count is not None and synchronises != is_asked:
            raise ConfigurationError(
                "gradient hooks run on the gradients of each pass, which a (sum, count) inside of no_sync divides by "
                "the count of later passes too; remove the hooks, or leave no_sync out"
            )
        if count is not None and units is not None:
            units.refuse_sums()
        if optimizer.num_steps < FIRST_STEPS:
            check_loss(loss.detach(), self.grid)
            self.labels.check_factor(loss, kind is LossKind.MEAN_OF_ROWS)
            if count is not None:
                check_loss(torch.as_tensor(count).detach(), self.grid, "count of the loss")
            if synchronises:
                check_kind(kind, self.grid)
