"""One pass through a model, and the step of `execute_pipeline` (`run_batch`).

What surrounds a pass is entered here for every loop, so that no loop forgets an option. The callers are `run_batch`,
`model(**batch)` on one stage and on several, `model.generate`, and `booster.backward` under a pipeline.

A `Batch` is made once for each call of a model. It becomes micro-batches: samples are split, or a row of packed
documents is cut between these. Replicas that wait for one another agree on the number of parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster import failure
from booster.data.rows import unknown_rows
from booster.errors import ConfigurationError
from booster.plugin import PipelineResult
from plugins.hybrid_parallel.data.checks import FIRST_STEPS, check_first_batch, check_parts, naming_entry
from plugins.hybrid_parallel.data.media import kinds_of_media, parameters_of_texts, without_empty_media
from plugins.hybrid_parallel.data.microbatch import (
    MANY,
    PackedRow,
    agreed_microbatches,
    as_batch,
    nothing_of,
    packed_row,
    split_batch,
    stand_in,
)
from plugins.hybrid_parallel.distributed.agreement import naming_ranks, raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP
from plugins.hybrid_parallel.guards import refuse_backward_of_step
from plugins.hybrid_parallel.loss.arithmetic import scaled
from plugins.hybrid_parallel.loss.choice import ChosenLoss, LossSource
from plugins.hybrid_parallel.loss.step_loss import ModelStepLoss, NoLoss, StepLoss
from plugins.hybrid_parallel.pipeline.runtime import PassState
from plugins.hybrid_parallel.step.outputs import broadcast_outputs, detached, merge_outputs
from plugins.hybrid_parallel.zero.reducer import BackwardPasses
from shardformer.attention import log_once
from shardformer.attention.packed_documents import may_be_packed
from shardformer.context_parallel.zigzag import record_facts
from shardformer.loss.terms import ASKED

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


class PassKind(Enum):
    """What a pass is for: a STEP runs forward and backward; TRAIN only forward, and BACKWARD may follow later."""

    STEP = "step"
    TRAIN = "train"
    EVALUATE = "evaluate"
    GENERATE = "generate"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Pass:
    """A pass through a model, in one or several micro-batches."""

    kind: PassKind
    # the arguments of the model's forward, on the device; None if they are not known
    batch: Mapping[str, Any] | None = None
    has_rows: bool = True  # whether this replica has samples; a pass on placeholders has none

    @property
    def trains(self) -> bool:
        """Whether gradients of its forward passes are needed."""
        return self.kind in (PassKind.STEP, PassKind.TRAIN)

    @property
    def goes_back(self) -> bool:
        """Whether it is the backward pass of forward passes before it."""
        return self.kind is PassKind.BACKWARD

    @property
    def generates(self) -> bool:
        """Whether it makes tokens, for which nothing is trained or drawn from the model's stream."""
        return self.kind is PassKind.GENERATE


AroundPass = Callable[[Pass], AbstractContextManager[Any]]  # what a feature hangs into `model.around_passes`


@contextmanager
def in_pass(
    model: HybridParallelModel,
    this: Pass,
    inputs: Sequence[Mapping[str, Any]] = (),
    reading: AbstractContextManager[Any] | None = None,
) -> Iterator[None]:
    """Run a pass in this context; all ranks of the model enter it together.

    Args:
        inputs: arguments of each forward pass, as many on all replicas.
        reading: context in which heads give what the loss reads.

    Raises:
        ConfigurationError: if a parameter has been replaced since `boost`.
    """
    if this.kind is not PassKind.GENERATE:
        model.check_weights()
    for optimizer in model.optimizers:
        optimizer.wait_for_parameters()
    with ExitStack() as stack:
        if this.batch is not None:
            shapes = {name: list(value.shape) for name, value in this.batch.items() if isinstance(value, Tensor)}
            failure.begin_batch(model.mesh.rank("dp"), shapes)
            stack.enter_context(naming_ranks())
            stack.enter_context(naming_entry(this.batch))
        stack.enter_context(model.gathers.running())
        for around in model.around_passes:
            stack.enter_context(around(this))
        if not this.goes_back:
            stack.enter_context(torch.set_grad_enabled(this.trains))
        if reading is not None:
            stack.enter_context(reading)
        if this.kind is PassKind.STEP:
            for optimizer in model.optimizers:
                stack.enter_context(optimizer.accepting_gradients())
        if inputs:
            _agree_on_media(model, inputs)
        if this.kind is PassKind.STEP and model.runtime.recorder is not None:
            stack.enter_context(model.runtime.recorder.step())
        yield


def _agree_on_media(model: HybridParallelModel, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Gather the towers of images and sounds now, if under ZeRO stage 3 some replicas alone are about to run them."""
    if not model.gathers or not model.options.media_tokens or model.mesh.size(DP_CP) == 1:
        return
    flags = torch.tensor([kinds_of_media(each) for each in inputs], dtype=torch.int32)
    extremes = torch.stack([flags, -flags])  # on the CPU: reading the result must not wait for the device
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=model.mesh.group(DP_CP))
    if (extremes[0] != -extremes[1]).any():
        model.gathers.keep_all_but(parameters_of_texts(model.options.inside))


@dataclass(frozen=True)
class BatchSplit:
    """A batch in parts."""

    # the micro-batches of this replica, with labels; empty if its share of the batch is empty
    own: list[dict[str, Any]]
    # the same, and placeholders, because other ranks wait for this one at the experts
    microbatches: list[dict[str, Any]]
    lengths: tuple[int, ...] | None  # tokens of each micro-batch, if they are parts of one row; otherwise None
    rows: int  # samples of this replica; 1 if nothing counts them


@dataclass(frozen=True)
class Batch:
    """The batch of one call of a model."""

    model: HybridParallelModel
    # the arguments of the model's forward, on the device; `position_ids` alone tell of packed documents
    entries: dict[str, Any]
    on_host: Mapping[str, Any]  # the same entries as they were given
    args: tuple = ()  # positional arguments, which have no names
    criterion: Callable[[Any, Any], Any] | None = None  # the user's loss; None for the model's own

    @staticmethod
    def of(
        model: HybridParallelModel,
        given: Mapping[str, Any],
        args: tuple = (),
        criterion: Callable[[Any, Any], Any] | None = None,
    ) -> Batch:
        """Return the batch of a call; raises ConfigurationError if borders of documents do not fit the rows."""
        given = model.options.with_document_positions(given)
        if model.options.media_tokens:
            given = without_empty_media(given)
        made = Batch(model, model.on_device(given, args), given, args, criterion)
        model.options.check_positions(given, model.mesh.size("dp") > 1 or made._may_be_cut or model.units is not None)
        return made

    @cached_property
    def rows(self) -> int | None:
        """The number of samples among the named entries; None if these do not tell."""
        return self.model.options.rows_of(self.entries)

    @property
    def has_rows(self) -> bool:
        """Whether this replica has samples."""
        return bool(self.args) or self.rows != 0

    @cached_property
    def is_packed(self) -> bool:
        """Whether its rows may be packed documents."""
        return may_be_packed(self.entries)

    @cached_property
    def loss(self) -> ChosenLoss:
        """Which loss the model has for it."""
        return self.model.losses.choose(self.entries, self.criterion)

    def step_loss(self, microbatches: list[dict[str, Any]]) -> StepLoss:
        """Return that loss for a step over this replica's micro-batches; all replicas call this."""
        return self.model.losses.step_loss(self.loss, microbatches, self.entries)

    def placeholder(self) -> dict[str, Any]:
        """Return a sample that stands for an empty share: layers take no empty batch, and other ranks may wait."""
        return stand_in(self.entries, self.model.options.media_tokens, self.rows or 0)

    def inputs_of(self, microbatch: Mapping[str, Any], loss: StepLoss) -> dict[str, Any]:
        """Return the arguments of the forward for a part, without what the loss alone reads; caches are not filled."""
        options, head_loss = self.model.options, self.model.head_loss
        unread = options.unread(microbatch) if self.criterion is not None else ()
        inputs = {name: value for name, value in microbatch.items() if name not in (*loss.own_entries, *unread)}
        if loss.balance is not None:
            inputs[ASKED] = False  # the model would compute the auxiliary loss of this stage's layers
        inputs = options.inputs(inputs, is_microbatch=True)
        return inputs if head_loss is None or isinstance(loss, ModelStepLoss) else head_loss.inputs(inputs)

    # ----- micro-batches -----

    def split(self, trains: bool, must_fill: bool = False, least: int = 0) -> BatchSplit:
        """Split the batch; all replicas call this.

        Args:
            least: the fewest micro-batches, also of an empty share.

        Raises:
            ConfigurationError: if the first batch must fill the pipeline and does not; raised on all replicas. If the
                samples of a batch must be counted, and it does not tell how many they are.
        """
        model, mesh, pipeline = self.model, self.model.mesh, self.model.pipeline
        rows = self._counted_rows()
        replicas = mesh.group("dp") if trains and mesh.size("dp") > 1 else None
        if model.units is not None:
            return self._in_units(trains, least, rows, replicas)
        row = self._packed_row(rows)
        units = rows if row is None else row.num_documents
        if must_fill and not model.checked_full_batch:
            is_row = rows == 1 and self.is_packed  # which may have few documents in any step
            least = pipeline.least_batch_size
            check_first_batch(max(units, least) if is_row else units, least, mesh)
            model.checked_full_batch = True
        # Replicas wait for one another at features that all of them compare.
        if model.replicas_wait(trains) or self.loss.compares:
            count = agreed_microbatches(units, pipeline.microbatches_of, mesh)
        else:
            count = pipeline.microbatches_of(units, mesh.size("pp")) if units else 0
        if not trains and self.loss.source is LossSource.HEAD and model.head_loss.has_parts:
            count = min(count, 1)  # micro-batches would each have their own
        check_parts(model.unwrap(), self.entries, count, replicas)
        cuts = None if row is None or count < 2 else row.cuts(count, model.options.hidden_size)
        tokens = model.options.media_tokens
        own, given = (
            split_batch(each, count, cuts, tokens, rows) if rows else [] for each in (self.entries, self.on_host)
        )
        if mesh.size("cp") > 1 or self.is_packed:
            record_facts(own, given)
        lengths = None if cuts is None else tuple(end - start for start, end in itertools.pairwise(cuts))
        return BatchSplit(own, own or [self.placeholder()] * max(count, least), lengths, rows)

    def _counted_rows(self) -> int:
        """Return the number of samples; 1 if the batch does not tell and need not, because it stays whole."""
        model, is_known = self.model, self.rows is not None
        if model.units is None and not self._may_be_cut:
            return self.rows if is_known else 1
        if model.mesh.size("dp") > 1 and model.batches_seen <= FIRST_STEPS:
            is_known = is_known_to_all(is_known, model.mesh.group("dp"))
        if not is_known:
            raise unknown_rows(self.entries)
        return self.rows

    @property
    def _may_be_cut(self) -> bool:
        return self.model.pipeline.microbatches_of(MANY, self.model.mesh.size("pp")) > 1

    def _in_units(self, trains: bool, least: int, rows: int, replicas: dist.ProcessGroup | None) -> BatchSplit:
        """Split into units of `reproducible=True`; placeholders follow while other replicas have more."""
        model, tokens = self.model, self.model.options.media_tokens
        count = model.units.begin(rows, model.step_number, model.replicas_wait(trains))
        own = model.units.cut(self.entries, rows, tokens)
        check_parts(model.unwrap(), self.entries, len(own), replicas)
        if self.is_packed:
            record_facts(own, model.units.cut(self.on_host, rows, tokens))
        return BatchSplit(own, own + [self.placeholder()] * (max(count, least) - len(own)), None, rows)

    def _packed_row(self, rows: int) -> PackedRow | None:
        """Return the documents of a batch of one row that may be cut between them; None if there are none."""
        source, head_loss = self.loss.source, self.model.head_loss
        if rows != 1 or not self._may_be_cut or source in (LossSource.CRITERION, LossSource.MODEL):
            return None
        if head_loss is None or not self.model.options.keeps_documents_apart:
            return None
        has_labels = source is LossSource.HEAD
        # On one stage, the outputs of a batch without labels may include attentions of the whole row.
        return packed_row(self.on_host, head_loss, has_labels) if has_labels or self.model.mesh.size("pp") > 1 else None


def is_known_to_all(is_known: bool, group: dist.ProcessGroup) -> bool:
    """Return whether all replicas know something."""
    known = torch.tensor(is_known, dtype=torch.int32)  # on the CPU, as it is read at once
    dist.all_reduce(known, op=dist.ReduceOp.MIN, group=group)
    return bool(known)


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
