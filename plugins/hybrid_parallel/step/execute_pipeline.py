"""One step of `execute_pipeline`: split the batch, run the schedule, finish gradients, loss and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from booster.plugin import PipelineResult
from plugins.hybrid_parallel.data.microbatch import as_batch, nothing_of
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP
from plugins.hybrid_parallel.guards import refuse_backward_of_step
from plugins.hybrid_parallel.loss.arithmetic import scaled
from plugins.hybrid_parallel.loss.step_loss import NoLoss, StepLoss
from plugins.hybrid_parallel.pipeline.runtime import PassState
from plugins.hybrid_parallel.step.outputs import broadcast_outputs, detached, merge_outputs
from plugins.hybrid_parallel.step.passes import Batch, BatchSplit, Pass, PassKind, in_pass
from plugins.hybrid_parallel.zero.reducer import BackwardPasses
from shardformer.attention import log_once

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


def run_batch(
    model: HybridParallelModel,
    batch: Any,
    criterion: Callable[[Any, Any], Any] | None = None,
    trains: bool = True,
    return_loss: bool = True,
    return_outputs: bool = False,
) -> PipelineResult:
    """Run one batch, see `Booster.execute_pipeline`; `criterion`: None for the model's loss; `trains`: backward."""
    batch, runtime = _checked(model, batch, criterion, trains), model.runtime
    split = batch.split(trains, must_fill=trains)
    loss = batch.step_loss(split.own)
    if trains and isinstance(loss, NoLoss):
        raise ConfigurationError(
            f"the batch has no labels (it has {', '.join(batch.entries)}), so that there is no loss to train on; "
            "give the model's labels in the batch, or pass a criterion"
        )
    if trains:
        model.trace.begin(split.microbatches, loss.shares)
    inputs = [batch.inputs_of(microbatch, loss) for microbatch in split.microbatches]
    loss.passes, outputs = len(inputs), [] if return_outputs else None
    this = Pass(PassKind.STEP if trains else PassKind.EVALUATE, batch.entries, bool(split.own))
    with in_pass(model, this, inputs, loss.reading(model, keeps_outputs=return_outputs)):
        backwards = BackwardPasses(model.reducers, runtime.stage_parameters) if trains else None
        finish = _finish_forward(model, loss, len(split.own), trains, outputs)
        state = PassState(runtime, inputs, finish, loss.balance)
        if loss.balance is None and not loss.needs_all_forwards:
            state.execute(runtime.turns(len(inputs), trains), backwards)
        else:
            _run_phases(model, state, loss, backwards)
    reducers = model.reducers if trains else ()
    for reducer in reducers:
        reducer.launch_rest()
    value, factor = loss.finish(return_loss)
    for reducer in reducers:
        reducer.finish(factor)
    if value is not None:
        value = value.to(torch.float64 if model.options.dtype == torch.float64 else torch.float32)
        value.backward, value.__getstate__ = refuse_backward_of_step, _no_state
    return PipelineResult(value, None if outputs is None else _share_outputs(model, outputs, split))


def _no_state() -> None:
    """Replace `__getstate__` of that loss, so that it is pickled as any tensor is."""


def _checked(
    model: HybridParallelModel, batch: Any, criterion: Callable[[Any, Any], Any] | None, trains: bool
) -> Batch:
    """Return the batch, after the checks of what ranks must share."""
    model.refuse_unseen_hooks()
    made = Batch.of(model, as_batch(batch), criterion=criterion)
    of_criterion = () if criterion is None else model.options.unread(made.on_host)
    if of_criterion:
        name = type(model.unwrap()).__name__
        log_once(name, f"takes no {', '.join(of_criterion)}, which the criterion alone reads")
    if trains:
        model.begin_training(made.entries)
        for reducer in model.reducers:
            reducer.settle()
    return made


def _finish_forward(
    model: HybridParallelModel, loss: StepLoss, num_own: int, trains: bool, keep: list[Any] | None
) -> Callable[[Any, int], Tensor | None]:
    """Return what the last stage makes of outputs; those behind the first `num_own`, placeholders, add nothing."""

    def finish_forward(outputs: Any, index: int) -> Tensor | None:
        if index >= num_own and not loss.counts_without_rows:
            return nothing_of(outputs)
        outputs = outputs if loss.reads_parts else model.whole_sequences(outputs)
        share = loss.share(outputs, index)
        if keep is not None and index < num_own:
            kept = detached(model.gathered(outputs) if loss.reads_parallel_logits else outputs)
            keep.append(_without(kept, loss.coupled_outputs if loss.passes > 1 else ()))
        return scaled(share, model.optimizers[0].loss_scale.value) if trains else share

    return finish_forward


def _run_phases(model: HybridParallelModel, state: PassState, loss: StepLoss, passes: BackwardPasses | None) -> None:
    """Run all forward passes before any backward pass, for gradients that depend on all of them."""
    runtime, balance = model.runtime, loss.balance
    forwards, backwards = runtime.phases(len(state.microbatches))
    state.execute(forwards)
    if balance is not None:
        value = balance.factor * balance.finish()
        if runtime.has_last_stage:  # once for each replica
            loss.total += value / model.mesh.size(DP_CP)
        if passes is not None:
            balance.weight = balance.factor * model.optimizers[0].loss_scale.value
    if passes is not None:
        state.execute(backwards, passes)


def _share_outputs(model: HybridParallelModel, outputs: list[Any], split: BatchSplit) -> Any:
    """Broadcast the merged outputs to every stage; return None if this replica's share of the batch was empty."""
    if not split.own:
        return None
    runtime, rows = model.runtime, [model.options.rows_of(each) for each in split.own]

    def merge() -> Any:
        return merge_outputs(outputs, split.lengths, rows) if runtime.has_last_stage else None

    if model.mesh.size("pp") == 1:
        return merge()
    merged = raise_on_all_ranks(merge, model.mesh.group("pp"))
    return broadcast_outputs(merged, model.mesh, runtime.rank_of_last_stage)


def _without(outputs: Any, names: Collection[str]) -> Any:
    """Return outputs without those of `names`, of which parts of a batch have only parts."""
    if not names or not isinstance(outputs, Mapping):
        return outputs
    return type(outputs)(**{name: value for name, value in outputs.items() if name not in names})
