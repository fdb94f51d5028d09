"""One step of `execute_pipeline`: split the batch, run the schedule, finish gradients, loss and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from booster.plugin import PipelineResult
from plugins.hybrid_parallel.boosted.batch_split import BatchSplit, BatchSplitter
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.config.pipeline import PipelineOptions
from plugins.hybrid_parallel.data.microbatch import as_batch, nothing_of
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import scaled
from plugins.hybrid_parallel.loss.step_loss import NoLoss, StepLoss
from plugins.hybrid_parallel.pipeline.outputs import broadcast_outputs, detached, merge_outputs
from plugins.hybrid_parallel.pipeline.runtime import PassState
from plugins.hybrid_parallel.zero.backward_checks import BackwardPasses
from plugins.hybrid_parallel.zero.joint_gradients import accepting_gradients
from shardformer.attention import log_once


class PipelineStep:
    """One training or evaluation step of `execute_pipeline`.

    Args:
        model: the boosted model.
        mesh: the grid of ranks.
        pipeline: how a batch is split.
        criterion: the user's loss, or None for the model's own.
        trains: whether to run the backward pass.
    """

    def __init__(
        self,
        model: HybridParallelModel,
        mesh: HybridMesh,
        pipeline: PipelineOptions,
        criterion: Callable[[Any, Any], Any] | None,
        trains: bool,
    ) -> None:
        self.model, self.mesh, self.criterion, self.trains = model, mesh, criterion, trains
        self.splitter = BatchSplitter(model, pipeline)

    def run(self, batch: Any, return_loss: bool, return_outputs: bool) -> PipelineResult:
        """Run one batch; see `Booster.execute_pipeline`."""
        self.model.refuse_unseen_hooks()
        given = self.model.with_document_positions(as_batch(batch))
        of_criterion = () if self.criterion is None else self.model.options.unread(given)
        if of_criterion:
            name = type(self.model.unwrap()).__name__
            log_once(name, f"takes no {', '.join(of_criterion)}, which the criterion alone reads")
        batch = self.model.on_device(given)
        if self.trains:
            self.model.begin_training(batch)
            for reducer in self.model.reducers:
                reducer.settle()
        reads_rows = self.criterion is not None
        split = self.splitter.split(batch, given, self.trains, reads_rows=reads_rows, must_fill=self.trains)
        own, microbatches = split.own, split.microbatches
        loss = self.model.step_loss(own, self.criterion, batch)
        if self.trains and isinstance(loss, NoLoss):
            raise ConfigurationError(
                f"the batch has no labels (it has {', '.join(batch)}), so that there is no loss to train on; "
                "give the model's labels in the batch, or pass a criterion"
            )
        if self.trains:
            self.model.trace.begin(microbatches, loss.shares)
        outputs: list[Any] = []
        with self.model.in_forward(batch, self.trains and bool(own)):
            self._run_schedule(microbatches, loss, len(own), outputs if return_outputs else None)
        for optimizer in self.model.optimizers if self.trains else ():
            optimizer.reducer.launch_rest()
        value, factor = loss.finish(return_loss)
        if self.trains:
            for optimizer in self.model.optimizers:
                optimizer.reducer.finish(factor)
        if value is not None:
            value = value.to(torch.float64 if self.model.options.dtype == torch.float64 else torch.float32)
        return PipelineResult(value, self._share_outputs(outputs, split) if return_outputs else None)

    def _run_schedule(
        self, microbatches: list[dict[str, Any]], loss: StepLoss, num_own: int, keep: list[Any] | None
    ) -> None:
        """Run the passes; those after the first `num_own` add nothing to the loss and no outputs to `keep`."""
        runtime = self.model.runtime
        inputs = [self.model.inputs_of(microbatch, loss) for microbatch in microbatches]

        def finish_forward(outputs: Any, index: int) -> Tensor | None:
            if index >= num_own and not loss.counts_without_rows:
                return nothing_of(outputs)
            outputs = outputs if loss.reads_parts else self.model.whole_sequences(outputs)
            share = loss.share(outputs, index)
            if keep is not None and index < num_own:
                kept = detached(self.model.gathered(outputs) if loss.reads_parallel_logits else outputs)
                keep.append(_without(kept, loss.coupled_outputs if len(microbatches) > 1 else ()))
            return scaled(share, self.model.optimizers[0].loss_scale.value) if self.trains else share

        loss.passes = len(microbatches)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.trains))
            stack.enter_context(loss.reading(self.model, keeps_outputs=keep is not None))
            stack.enter_context(accepting_gradients(self.model.optimizers if self.trains else ()))
            self.model.agree_on_media(inputs)
            if self.trains and runtime.recorder is not None:
                stack.enter_context(runtime.recorder.step())
            if loss.balance is None and not loss.needs_all_forwards:
                turns = runtime.turns(len(microbatches), self.trains)
                runtime.run(turns, inputs, finish_forward, self._passes())
            else:
                self._run_phases(runtime.begin(inputs, finish_forward, loss.balance), loss)

    def _run_phases(self, step: PassState, loss: StepLoss) -> None:
        """Run all forward passes before any backward pass, for gradients that depend on all of them."""
        runtime, balance = self.model.runtime, loss.balance
        forwards, backwards = runtime.phases(len(step.microbatches))
        runtime.execute(step, forwards)
        if balance is not None:
            value = balance.factor * balance.finish()
            if runtime.has_last_stage:  # once for each replica
                loss.total += value / self.mesh.size(DP_CP)
            if self.trains:
                balance.weight = balance.factor * self.model.optimizers[0].loss_scale.value
        if self.trains:
            runtime.execute(step, backwards, self._passes())

    def _passes(self) -> BackwardPasses | None:
        return BackwardPasses(self.model.reducers, self.model.runtime.stage_parameters) if self.trains else None

    def _share_outputs(self, outputs: list[Any], split: BatchSplit) -> Any:
        """Broadcast the merged outputs to every stage; return None if this replica's share of the batch was empty."""
        if not split.own:
            return None
        runtime = self.model.runtime
        merged = merge_outputs(outputs, split.lengths) if runtime.has_last_stage else None
        if self.mesh.size("pp") == 1:
            return merged
        return broadcast_outputs(merged, self.mesh, runtime.rank_of_last_stage)


def _without(outputs: Any, names: Collection[str]) -> Any:
    """Return outputs without those of `names`, of which parts of a batch have only parts."""
    if not names or not isinstance(outputs, Mapping):
        return outputs
    return type(outputs)(**{name: value for name, value in outputs.items() if name not in names})
