"""One step of `execute_pipeline`: split the batch, run the schedule, finish gradients, loss and outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from booster.plugin import PipelineResult
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.config.debugging import DebugOptions
from plugins.hybrid_parallel.config.pipeline import PipelineOptions
from plugins.hybrid_parallel.data.batch_check import check_batch
from plugins.hybrid_parallel.data.index_check import naming_entry
from plugins.hybrid_parallel.data.microbatch import as_batch, nothing_of, num_rows, split_batch, stand_in, to_device
from plugins.hybrid_parallel.data.microbatch_count import MANY, agreed_microbatches
from plugins.hybrid_parallel.data.packed_rows import PackedRow, packed_row
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import scaled
from plugins.hybrid_parallel.loss.step_loss import NoLoss, StepLoss
from plugins.hybrid_parallel.pipeline.outputs import broadcast_outputs, detached, merge_outputs
from plugins.hybrid_parallel.pipeline.runtime import PassState
from plugins.hybrid_parallel.zero.frozen import check_tied
from plugins.hybrid_parallel.zero.joint_gradients import accepting_gradients
from plugins.hybrid_parallel.zero.passes import BackwardPasses
from shardformer.attention.packed_documents import may_be_packed
from shardformer.context_parallel.batch_facts import record_facts
from shardformer.layers.fp8 import weights_rounded_once
from shardformer.loss.terms import LOSS_KEYWORDS


class PipelineStep:
    """One training or evaluation step of `execute_pipeline`.

    Args:
        model: the boosted model.
        mesh: the grid of ranks.
        pipeline: how a batch is split.
        debugging: whether and when ranks compare their state.
        criterion: the user's loss, or None for the model's own.
        trains: whether to run the backward pass.
    """

    def __init__(
        self,
        model: HybridParallelModel,
        mesh: HybridMesh,
        pipeline: PipelineOptions,
        debugging: DebugOptions,
        criterion: Callable[[Any, Any], Any] | None,
        trains: bool,
    ) -> None:
        self.model, self.mesh, self.criterion, self.trains = model, mesh, criterion, trains
        self.pipeline, self.debugging = pipeline, debugging

    def run(self, batch: Any, return_loss: bool, return_outputs: bool) -> PipelineResult:
        """Run one batch; see `Booster.execute_pipeline`."""
        self.model.refuse_unseen_hooks()
        uncast = (*getattr(self.criterion, "own_entries", ()), *LOSS_KEYWORDS)  # counts would be rounded in 16 bits
        given = self.model.told_of_documents(as_batch(batch))
        batch = to_device(given, self.mesh.device, self.model.input_dtype, uncast)
        if self.trains and self.model.checks_this_batch():
            check_batch(batch, self.mesh)
        if self.trains and self.debugging.debug:
            # Before the pass: it would spread a divergence that arose between two steps.
            self.model.synchrony.run_at(self.debugging.synchrony_interval, self.model.optimizers)
        if self.trains:
            check_tied(self.model.tied, self.model.unwrap())
        own, on_host, count, cuts = self._cut(batch, given)
        if self.mesh.size("cp") > 1 or may_be_packed(batch):
            record_facts(own, on_host)
        # Other ranks wait for this one at the experts, even if its own share of the batch is empty.
        microbatches = own + [stand_in(batch)] * (count - len(own))
        loss = self.model.step_loss(own, self.criterion, batch)
        if self.trains and isinstance(loss, NoLoss):
            raise ConfigurationError(
                f"the batch has no labels (it has {', '.join(batch)}), so that there is no loss to train on; "
                "give the model's labels in the batch, or pass a criterion"
            )
        if self.trains:
            self.model.trace.begin(microbatches, loss.shares)
        outputs: list[Any] = []
        with naming_entry(batch):
            self._run_schedule(microbatches, loss, len(own), outputs if return_outputs else None)
        for optimizer in self.model.optimizers if self.trains else ():
            optimizer.reducer.launch_rest()
        value, factor = loss.finish(return_loss)
        if self.trains:
            for optimizer in self.model.optimizers:
                optimizer.reducer.finish(factor)
        if value is not None:
            value = value.to(torch.float64 if self.model.dtype == torch.float64 else torch.float32)
        lengths = None if cuts is None else [end - start for start, end in itertools.pairwise(cuts)]
        return PipelineResult(value, self._share_outputs(outputs, bool(own), lengths) if return_outputs else None)

    def _cut(
        self, batch: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int, list[int] | None]:
        """Cut this replica's batch.

        Args:
            batch: on the device.
            given: the same batch as it was given.

        Returns:
            The micro-batches of `batch`, those of `given`, the number of passes, and the token indices where a packed
            row was cut. Passes that have no micro-batch wait for other ranks.
        """
        rows, units = num_rows(batch), self.model.units
        if units is not None:
            count = units.begin(rows, self.model.step_number, self.model.replicas_wait(self.trains))
            return units.cut(batch), units.cut(given), count, None
        row = self._packed_row(given)
        is_row = rows == 1 and may_be_packed(batch)
        count = self._num_microbatches(rows if row is None else row.num_documents, is_row)
        cuts = None if row is None or count < 2 else row.cuts(count, self.model.options.hidden_size)
        own, on_host = (split_batch(each, count, cuts) if rows else [] for each in (batch, given))
        return own, on_host, count, cuts

    def _packed_row(self, batch: Mapping[str, Any]) -> PackedRow | None:
        """Return the documents of a batch of one row that may be cut between them; None if there are none."""
        losses = self.model.losses
        if self.pipeline.microbatches_of(num_rows(batch) and MANY, self.mesh.size("pp")) < 2:
            return None
        is_known = self.criterion is None and losses.head_loss is not None and not losses.lacks_labels(batch)
        if not is_known or not self.model.options.keeps_documents_apart or losses.own_reason(batch) is not None:
            return None
        return packed_row(batch, losses.head_loss)

    def _num_microbatches(self, rows: int, is_row: bool) -> int:
        """Return the number of micro-batches.

        Args:
            rows: number of samples, or of documents that are packed into a row.
            is_row: whether it is a row that may be packed, and may have few documents in any step.
        """
        if self.trains and not self.model.checked_full_batch:
            self._refuse_short_start(max(rows, self.pipeline.least_batch_size) if is_row else rows)
            self.model.checked_full_batch = True
        if self.model.replicas_wait(self.trains):
            return agreed_microbatches(rows, self.pipeline.microbatches_of, self.mesh)
        return self.pipeline.microbatches_of(rows, self.mesh.size("pp")) if rows else 0

    def _refuse_short_start(self, rows: int) -> None:
        """Refuse a first batch that cannot fill the pipeline; only the last batch of an epoch may be short.

        The replicas agree, because a rank that raised alone would leave the others waiting.
        """
        least = self.pipeline.least_batch_size
        fewest = torch.tensor(rows)  # on the CPU, as above
        if self.mesh.size("dp") > 1:
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self.mesh.group("dp"))
        rows = int(fewest)
        if rows < least:
            raise ConfigurationError(
                f"the batch has {rows} samples, fewer than num_microbatches={least}; "
                f"use batches of {least} or more, or num_microbatches={max(rows, 1)}"
            )

    def _run_schedule(
        self, microbatches: list[dict[str, Any]], loss: StepLoss, num_own: int, keep: list[Any] | None
    ) -> None:
        """Run the passes; those after the first `num_own` add nothing to the loss and no outputs to `keep`."""
        runtime = self.model.runtime
        inputs = [self.model.inputs_of(microbatch, loss) for microbatch in microbatches]

        def finish_forward(outputs: Any, index: int) -> Tensor | None:
            if index >= num_own:
                return nothing_of(outputs)
            outputs = outputs if loss.reads_parts else self.model.whole_sequences(outputs)
            share = loss.share(outputs, index)
            if keep is not None:
                kept = detached(self.model.gathered(outputs) if loss.reads_parallel_logits else outputs)
                keep.append(_without(kept, loss.coupled_outputs if len(microbatches) > 1 else ()))
            return scaled(share, self.model.optimizers[0].loss_scale.value) if self.trains else share

        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.trains))
            stack.enter_context(self.model.running())
            stack.enter_context(weights_rounded_once(runtime.module))
            stack.enter_context(loss.reading(self.model, keeps_outputs=keep is not None))
            stack.enter_context(accepting_gradients(self.model.optimizers if self.trains else ()))
            if self.trains and runtime.recorder is not None:
                stack.enter_context(runtime.recorder.step())
            if loss.balance is None:
                turns = runtime.turns(len(microbatches), self.trains)
                runtime.run(turns, inputs, finish_forward, self._passes())
            else:
                self._run_phases(runtime.begin(inputs, finish_forward, loss.balance), loss)

    def _run_phases(self, step: PassState, loss: StepLoss) -> None:
        """Run all forward passes before any backward pass: the gradients of routers depend on all of them."""
        runtime, balance = self.model.runtime, loss.balance
        forwards, backwards = runtime.phases(len(step.microbatches))
        runtime.execute(step, forwards)
        value = balance.factor * balance.finish()
        if runtime.has_last_stage:  # once for each replica
            loss.total += value / self.mesh.size(DP_CP)
        if self.trains:
            balance.weight = balance.factor * self.model.optimizers[0].loss_scale.value
            runtime.execute(step, backwards, self._passes())

    def _passes(self) -> BackwardPasses | None:
        return BackwardPasses(self.model.reducers, self.model.runtime.stage_parameters) if self.trains else None

    def _share_outputs(self, outputs: list[Any], ran: bool, lengths: list[int] | None) -> Any:
        """Broadcast the merged outputs to every stage; return None if this replica's share of the batch was empty.

        Args:
            lengths: tokens of each micro-batch, if they are parts of one row.
        """
        if not ran:
            return None
        runtime = self.model.runtime
        merged = merge_outputs(outputs, lengths) if runtime.has_last_stage else None
        if self.mesh.size("pp") == 1:
            return merged
        return broadcast_outputs(merged, self.mesh, runtime.rank_of_last_stage)


def _without(outputs: Any, names: Collection[str]) -> Any:
    """Return outputs without those of `names`, of which parts of a batch have only parts."""
    if not names or not isinstance(outputs, Mapping):
        return outputs
    return type(outputs)(**{name: value for name, value in outputs.items() if name not in names})
