"""The ordinary loop: `outputs = model(**batch)`, any loss of them, and `booster.backward` (`LossBackward`).

On one stage, `run_one_stage` runs the forward pass. Under a pipeline, a call of the model runs all forward passes.
Every rank of the pipeline then has the loss, and fetches another output when its script reads it. Each rank repeats the
user's computation on the outputs; the gradients that it leaves on the last stage start the backward passes of the
micro-batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster import failure
from booster.data.rows import ItemCount, rows_of_call
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.data import checks
from plugins.hybrid_parallel.data.checks import FIRST_STEPS, ReplicaCheck
from plugins.hybrid_parallel.data.microbatch import LossesPromote, has_floats, nothing_of, without_rows
from plugins.hybrid_parallel.distributed.agreement import naming_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.guards import LabelCounts, check_weights_in_loss, refuse_without_optimizer
from plugins.hybrid_parallel.loss import arithmetic
from plugins.hybrid_parallel.loss.arithmetic import LossKind, ReplicaLosses, RowWeight, SumOverReplicas
from plugins.hybrid_parallel.loss.choice import LossSource
from plugins.hybrid_parallel.loss.step_loss import ModelStepLoss, NoLoss, RouterBalance, StepLoss
from plugins.hybrid_parallel.pipeline.runtime import PassState
from plugins.hybrid_parallel.step.outputs import (
    AUX_LOSS,
    CACHE_WITHHELD,
    LOSS,
    ROUTERS_WITHHELD,
    SCORES_WITHHELD,
    OutputGradients,
    StageOutputs,
    build,
    describe_outputs,
    detached,
    in_order,
    joined,
    leaves,
    reason_withheld,
)
from plugins.hybrid_parallel.step.passes import Batch, BatchSplit, Pass, PassKind, in_pass
from plugins.hybrid_parallel.zero.reducer import BackwardPasses, counting
from shardformer.context_parallel.zigzag import record_facts
from shardformer.distributed.process_groups import all_gather_json, broadcast_json
from shardformer.layers.embedding import parallel_logits
from shardformer.loss.terms import ASKED, DIVISOR
from shardformer.utils.module_paths import CACHE_NAMES

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.reproducible.feature import Units
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer


_BARE = ""  # the name of the output of a model that returns a single tensor


class UserLoop:
    """Calls of one model by the user's own loop.

    Attributes:
        pending: calls by number, that the backward pass under way has reached.
        losses: how the losses of replicas are put together.
        rows: samples of this replica in the last call in training; 0 if they are not known.
        labels: labels of that call; None if there were none.
    """

    def __init__(self, model: HybridParallelModel) -> None:
        self.model, self.pending = model, dict[int, PipelineCall]()
        self.losses, self.rows, self.labels = ReplicaLosses(model.mesh), 1, None
        self._num_calls = 0

    def begin(self, batch: Batch) -> RowWeight | None:
        """Begin a call in training: return the weight of this replica's rows; None if they need none."""
        self.labels = batch.entries.get("labels")
        if not self.model.optimizers:
            return None
        rows = rows_of_call(batch.args, batch.entries, self.model.options.main_input)
        self.rows = rows or 0
        return self.losses.begin(rows, self.model.step_number)

    @failure.guard("model(**batch)")
    def forward(self, batch: Batch) -> Any:
        """Run all forward passes of a batch, which all ranks call; return this replica's whole outputs."""
        if batch.args:
            raise ConfigurationError(
                "model(...) got positional arguments, which have no names by which a pipeline could split the batch; "
                "call model(**batch)"
            )
        model, weight, trains = self.model, None, torch.is_grad_enabled()
        agree(model.mesh, "calls model(**batch)")
        if trains:
            model.begin_training(batch.entries)
            model.trace.begin([batch.entries], [])
            weight = self.begin(batch)
        call = PipelineCall(model, self._num_calls, batch.split(trains, least=1), weight)
        self._num_calls += 1
        call.run(batch)
        return call.outputs()

    def loss_over_replicas(self, share: Tensor) -> Tensor:
        """Return the sum of the shares of a loss over all replicas (0-d, differentiable)."""
        mesh = self.model.mesh
        if mesh.size(DP_CP) == 1:
            return share
        return SumOverReplicas.apply(share, mesh.group(DP_CP), self.model.units is not None, self.losses)

    def backward(self, synchronises: bool) -> None:
        """Run the pipeline back for the calls that the loss has reached, last first; `synchronises`: gradients."""
        pending, self.pending = self.pending, {}
        numbers = sorted(pending, reverse=True)
        agree(self.model.mesh, f"calls booster.backward with a loss of the outputs {numbers}")
        for number in numbers:
            pending[number].run_backward(is_final=synchronises and number == numbers[-1])


class PipelineCall:
    """One call of the model: its outputs, and what its backward pass needs.

    Args:
        weight: that of this replica's rows in a mean of the script's own; None if there is one replica.
    """

    def __init__(self, model: Any, number: int, split: BatchSplit, weight: RowWeight | None) -> None:
        self.model, self.number, self.split, self.weight = model, number, split, weight
        self.rows, self.coupled = 0, ()
        self.results: list[dict[str, Any]] = []  # by micro-batch, on the last stage
        self.grads: dict[tuple[str, int], Tensor] = {}  # (output, position in it) -> gradient of the user's loss
        self.passes: PassState | None = None
        self.balance: RouterBalance | None = None
        self.num_steps = [optimizer.num_steps for optimizer in model.optimizers]
        self._header: dict[str, Any] = {}
        self._fields: list[str] = []  # outputs that the model may return, in order; on the last stage
        self._not_made: dict[str, str] = {}  # outputs of the plain model that no stage computes, and why

    # ----- forward -----

    def run(self, batch: Batch) -> None:
        """Run all forward passes."""
        model, runtime = self.model, self.model.runtime
        own, microbatches, lengths = self.split.own, self.split.microbatches, self.split.lengths
        loss = batch.step_loss(own)
        asks_routers = isinstance(loss, NoLoss) and model.losses.routers_are_asked(batch.entries)
        if asks_routers:
            loss.balance = model.losses.balance_without_labels(own)
        self.rows, self.coupled = self.split.rows, loss.coupled_outputs
        # Otherwise a stage would compute the loss of its own layers and tokens.
        not_of_stages = {ASKED: False} if asks_routers else {}
        inputs = [batch.inputs_of(microbatch, loss) | not_of_stages for microbatch in microbatches]
        trains, results, grads, loss.passes = torch.is_grad_enabled(), self.results, self.grads, len(inputs)

        def finish_forward(outputs: Any, index: int) -> OutputGradients | None:
            empty = index >= len(own)
            outputs = loss.of_tokens(outputs, microbatches[index]) if isinstance(loss, NoLoss) else outputs
            outputs = outputs if loss.reads_parts else model.whole_sequences(outputs)
            if isinstance(loss, ModelStepLoss) and not _has_loss(outputs):
                share = None  # a model without a head
            else:
                share = empty_share(outputs, loss, index) if empty else loss.share(outputs, index)
            whole = model.gathered(outputs) if loss.reads_parallel_logits else outputs
            result = dict(whole) if isinstance(whole, Mapping) else {_BARE: whole}
            self._fields = [field.name for field in fields(whole)] if is_dataclass(whole) else [*result]
            result = without_rows(result) if empty else result
            result.pop(LOSS, None)
            results.append(result if share is None else {LOSS: share, **result})
            return OutputGradients(results[-1], index, len(microbatches), lengths, grads) if trains else None

        this = Pass(PassKind.TRAIN if trains else PassKind.EVALUATE, batch.entries, bool(own))
        with in_pass(model, this, inputs, loss.reading(model, keeps_outputs=True)):
            self.passes = PassState(runtime, inputs, finish_forward, loss.balance)
            self.passes.execute(runtime.phases(len(inputs))[0])
        self.balance = loss.balance
        self._not_made = dict.fromkeys(CACHE_NAMES, CACHE_WITHHELD) if model.options.would_cache(batch.entries) else {}
        self._not_made |= {"router_logits": SCORES_WITHHELD} if self.balance is not None or asks_routers else {}
        self._not_made |= {AUX_LOSS: ROUTERS_WITHHELD} if self.balance is None and asks_routers else {}
        if not trains:
            self.passes = None

    def outputs(self) -> Any:
        """Return the outputs of all micro-batches; the loss is fetched now, other outputs when they are read."""
        runtime, mesh = self.model.runtime, self.model.mesh
        described = None
        if runtime.has_last_stage:
            described = describe_outputs(self.results, self.coupled, self.rows, self.split.lengths)
            if self.balance is not None and _BARE not in described:
                described[AUX_LOSS] = None  # comes of all stages
            described = in_order(described, self._not_made, self._fields)
        self._header = broadcast_json(described, mesh.group("pp"), runtime.rank_of_last_stage)
        withheld = {name: reason for name, node in self._header.items() if (reason := reason_withheld(node))}
        if _BARE in withheld:
            raise ConfigurationError(f"the output of the model {withheld[_BARE]}")
        if _BARE in self._header:
            return self.fetch(_BARE)
        outputs = StageOutputs(self._header, self.read, withheld | self._not_made)
        if LOSS in self._header:
            outputs[LOSS] = self.model.user_loop.loss_over_replicas(self._fetch_loss())
            if self.balance is not None:
                outputs[AUX_LOSS] = self.fetch(AUX_LOSS)
                outputs[LOSS] = outputs[LOSS] + (self.balance.factor * outputs[AUX_LOSS]).to(outputs[LOSS])
        return outputs

    @failure.guard("reading outputs of model(**batch)")
    def read(self, name: str) -> Any:
        """Fetch an output that the script reads first, on all ranks of the pipeline, which must all read it."""
        agree(self.model.mesh, f"reads outputs.{name} of call {self.number}")
        return self.fetch(name)

    def fetch(self, name: str) -> Any:
        """Broadcast an output from the last stage, or add up the auxiliary loss over all stages and replicas."""
        if name == AUX_LOSS and self.balance is not None:
            return self._with_border(self.balance.finish(), (AUX_LOSS, 0))
        positions = count()
        return build(self._header[name], lambda leaf: self._broadcast(name, next(positions), leaf))

    def _fetch_loss(self) -> Tensor:
        """Fetch the loss of this replica, or the exact sum over all replicas."""
        if self.model.units is None:
            return self.fetch(LOSS)
        leaf = self._header[LOSS]
        mine = [result[LOSS].detach() for result in self.results] if self.model.runtime.has_last_stage else []
        total = arithmetic.exact_sum(mine, self.model.mesh.replica_group)
        value = torch.tensor(total, dtype=getattr(torch, leaf["dtype"]), device=self.model.mesh.device)
        return self._with_border(value, (LOSS, 0)) if leaf["needs_grad"] else value

    def _broadcast(self, name: str, position: int, leaf: Mapping[str, Any]) -> Tensor:
        mesh, runtime = self.model.mesh, self.model.runtime
        if runtime.has_last_stage:
            parts = [leaves(result[name])[position].detach() for result in self.results]
            value = joined(parts, name == LOSS, self.split.lengths)
        else:
            value = torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device=mesh.device)
        dist.broadcast(value, runtime.rank_of_last_stage, group=mesh.group("pp"))
        return self._with_border(value, (name, position)) if leaf["needs_grad"] else value

    def _with_border(self, value: Tensor, key: tuple[str, int]) -> Tensor:
        """Return an output as part of the graph of the user's loss."""
        if not torch.is_grad_enabled():
            return value
        return _Border.apply(torch.empty(0, requires_grad=True), [value], self, key)

    # ----- backward -----

    def accept(self, key: tuple[str, int], grad: Tensor) -> None:
        """Take the gradient of the user's loss by an output; raises RuntimeError if this is the second one."""
        optimizers = self.model.optimizers
        if self.model.units is not None and key[0] != LOSS and self.model.mesh.size(DP_CP) > 1:
            raise ConfigurationError(
                f"the loss is computed from outputs.{key[0]} of one replica, whose mean rounds in another way than "
                "that of all, so that reproducible=True does not hold; use outputs.loss, or a criterion of "
                "execute_pipeline"
            )
        if not optimizers:
            refuse_without_optimizer(grad)
        if not optimizers[0].reducer.accepting:
            raise ConfigurationError(
                "loss.backward() does not run the stages of a pipeline; call booster.backward(loss, optimizer)"
            )
        if self.passes is None:
            raise RuntimeError(
                "backward() runs a second time through the outputs of one model(**batch), whose activations are freed "
                "by now; add the losses up and call booster.backward once, or call the model again"
            )
        if self.num_steps != [optimizer.num_steps for optimizer in optimizers]:
            raise RuntimeError(
                "backward() reached outputs from before optimizer.step(), which has changed the weights in place; "
                "call booster.backward before optimizer.step(), or call the model again"
            )
        is_of_all = key[0] == LOSS or (key[0] == AUX_LOSS and self.balance is not None)
        if self.weight is not None and not is_of_all:
            grad = self.weight.on_gradient(grad)
        self.grads[key] = grad.detach() if key not in self.grads else self.grads[key] + grad.detach()
        self.model.user_loop.pending[self.number] = self

    def run_backward(self, is_final: bool) -> None:
        """Run all backward passes of this call; `is_final`: whether they complete the gradients of the model."""
        runtime, passes = self.model.runtime, self.passes
        self.passes = None
        if self.balance is not None:
            self.balance.weight = self._weight_over_replicas(self.grads.pop((AUX_LOSS, 0), None))
        observer = BackwardPasses(self.model.reducers, runtime.stage_parameters, is_final)
        with in_pass(self.model, Pass(PassKind.BACKWARD)):
            passes.execute(runtime.phases(len(self.split.microbatches))[1], observer)
        self.results[:] = map(detached, self.results)  # the script may read outputs after the backward pass
        self.grads.clear()

    def _weight_over_replicas(self, weight: Tensor | None) -> Tensor:
        """Add up the weights of the auxiliary loss in the losses of replicas, which may differ: each has all of it."""
        mesh = self.model.mesh
        total = torch.zeros((), device=mesh.device) if weight is None else weight.float()
        if mesh.size(DP_CP) > 1:
            dist.all_reduce(total, group=mesh.group(DP_CP))
        return total


class _Border(torch.autograd.Function):
    """The border between the pipeline and the user's own computation."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: list[Tensor], call: PipelineCall, key: tuple[str, int]) -> Tensor:
        """Return an output of the pipeline; `anchor` makes it part of a graph.

        The output comes in a list: a tensor among the inputs would be returned as a view, which `loss *= 2` may not
        change.
        """
        ctx.call, ctx.key = call, key
        return value[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        """Leave the gradient for the backward passes of the pipeline."""
        ctx.call.accept(ctx.key, grad)
        return None, None, None, None


def agree(mesh: HybridMesh, action: str) -> None:
    """Compare what the scripts of a pipeline's ranks do next; raises ConfigurationError on all if they differ."""
    group = mesh.group("pp")
    mine = torch.tensor(zlib.crc32(action.encode()))
    everyone = [torch.empty_like(mine) for _ in range(mesh.size("pp"))]
    dist.all_gather(everyone, mine, group=group)
    if len(set(map(int, everyone))) == 1:
        return
    first, *_ = found = all_gather_json(action, group)
    other = next(index for index, each in enumerate(found) if each != first)
    raise ConfigurationError(
        f"stage 0 {first} while stage {other} {found[other]}; all ranks of a pipeline run the same script: read the "
        "same outputs on all of them, and print or save on one"
    )


def empty_share(outputs: Any, loss: StepLoss, index: int = 0) -> Tensor | None:
    """Return the share of an empty batch in the loss: zero in the precision of the others; None without a loss."""
    if isinstance(loss, NoLoss):
        return None
    if loss.counts_without_rows:
        return loss.share(outputs, index)
    nothing = nothing_of(outputs)
    return nothing.to(torch.promote_types(nothing.dtype, torch.float32))


def _has_loss(outputs: Any) -> bool:
    return isinstance(outputs, Mapping) and isinstance(outputs.get(LOSS), Tensor)


def run_one_stage(model: HybridParallelModel, batch: Batch) -> Any:
    """Run the forward pass of a batch; return the model's outputs, without rows if this replica has no samples."""
    trains, weight = torch.is_grad_enabled(), None
    if batch.is_packed:
        record_facts([batch.entries], [batch.on_host])
    batch = replace(batch, entries=model.options.inputs(batch.entries))
    if trains:
        model.begin_training(batch.entries, checks.check_batch_of_replica)
        model.trace.begin([batch.entries], [])
        weight = model.user_loop.begin(batch)
        batch = replace(batch, entries=arithmetic.off_inputs(batch.entries), args=arithmetic.off_inputs(batch.args))
    this = Pass(PassKind.TRAIN if trains else PassKind.EVALUATE, batch.entries, batch.has_rows)
    inputs = batch.entries if batch.has_rows else batch.placeholder()
    guard = failure.guard("model(**batch)", publishes=False)
    with guard, in_pass(model, this, [inputs if batch.has_rows else {}]):
        model.runtime.begin_microbatch(0)
        if batch.loss.source is LossSource.HEAD:
            outputs = _with_head_loss(model, batch, inputs)
        elif batch.loss.source is LossSource.MODEL:
            outputs = _with_own_loss(model, batch, inputs)
        else:
            outputs = _without_loss(model, batch, inputs)
    outputs = outputs if batch.has_rows else without_rows(outputs)
    return outputs if weight is None else weight.on_outputs(outputs)


def _without_loss(model: HybridParallelModel, batch: Batch, inputs: dict[str, Any]) -> Any:
    """Return outputs of whole sequences, or the scores of tokens that are asked for."""
    loss, balance = batch.step_loss([]), None
    if model.losses.routers_see_parts and model.losses.routers_are_asked(batch.entries):
        balance = model.losses.balance_without_labels([batch.entries] if batch.has_rows else [])
        if balance is None:
            raise ConfigurationError(
                "output_router_logits=True adds outputs.aux_loss of whole sequences, of which each rank has a part; "
                "use output_router_logits=False, or cp_size=1 and sequence_parallelism_mode='split_gather'"
            )
        inputs = {**inputs, ASKED: False}
    with loss.reading(model.module), nullcontext() if balance is None else balance.watching(0, 0):
        outputs = loss.of_tokens(model.module(*batch.args, **loss.inputs(inputs)), inputs)
    outputs = model.whole_sequences(outputs)
    return outputs if balance is None else type(outputs)(**{**outputs, AUX_LOSS: balance.loss_of_replica()})


def _with_head_loss(model: HybridParallelModel, batch: Batch, inputs: dict[str, Any]) -> Any:
    """Return outputs with the loss of the head, computed on this rank's logits."""
    loss = batch.step_loss([batch.entries] if batch.has_rows else [])
    balance = loss.balance
    not_of_parts = {} if balance is None else {ASKED: False}
    with parallel_logits(model.module):
        with nullcontext() if balance is None else balance.watching(0, 0):
            given = {**model.head_loss.inputs(inputs), **not_of_parts, "return_dict": True}
            outputs = model.module(*batch.args, **given)
        value = _share(batch, loss, outputs)
    outputs, aux_loss = model.gathered(outputs), loss.aux_loss
    if balance is not None:
        value = value + balance.share_of_batch().to(value)
        aux_loss = balance.latest
    if aux_loss is not None:
        outputs = type(outputs)(**{**outputs, AUX_LOSS: aux_loss})
    return _with_loss(model, outputs, value)


def _with_own_loss(model: HybridParallelModel, batch: Batch, inputs: dict[str, Any]) -> Any:
    """Return outputs with the loss that the model's forward computes, if it does."""
    own = [batch.entries] if batch.has_rows else []
    compared = batch.step_loss(own) if batch.loss.compares else None
    if compared is not None:
        reading = compared.reading(model)
    else:
        reading = LossesPromote() if has_floats((*batch.args, *inputs.values())) else nullcontext()
    if isinstance(items := inputs.get(DIVISOR), Tensor):  # last: the forward alone reads it
        inputs = {**inputs, DIVISOR: (items := items.as_subclass(ItemCount))}
    with reading:
        outputs = model.module(*batch.args, **inputs)
    if not _has_loss(outputs):
        return outputs
    if isinstance(items, ItemCount) and (items.divides_sum(outputs[LOSS]) or not items.was_read):
        batch = replace(batch, entries={**batch.entries, DIVISOR: items if items.was_read else None})
    # Only now: replicas may call a model that returns no loss without each other.
    loss = compared or batch.step_loss(own)
    return _with_loss(model, outputs, _share(batch, loss, outputs))


def _share(batch: Batch, loss: StepLoss, outputs: Any) -> Tensor:
    return loss.share(outputs, 0) if batch.has_rows else empty_share(outputs, loss)


def _with_loss(model: HybridParallelModel, outputs: Mapping[str, Any], share: Tensor) -> Any:
    """Return `outputs` with the sum of the shares of the loss over all replicas."""
    rest = {key: item for key, item in outputs.items() if key != LOSS}
    return type(outputs)(loss=model.user_loop.loss_over_replicas(share), **rest)


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
        loss, count = arithmetic.loss_and_count(loss)
        kind = LossKind.SUM if count is not None else LossKind.MEAN_OF_ROWS if by_rows else LossKind.MEAN_OF_REPLICAS
        trained = [model for model in models if optimizer in model.optimizers]
        others = [each for model in models if model not in trained for each in model.optimizers]
        # Gradient hooks run once per pass, as in plain torch, so each pass is reduced by itself.
        is_asked = all(model.require_backward_grad_sync for model in models)
        synchronises = is_asked or any(each.reducer.hooks for each in optimizer.peers)
        self._check(loss, count, kind, optimizer, is_asked, synchronises, trained[0].units if trained else None)
        if kind is LossKind.MEAN_OF_ROWS and synchronises:
            self.labels.compare(loss, trained[0].user_loop)
        count = None if count is None else arithmetic.over_replicas(count, self.grid)
        with ExitStack() as stack:
            stack.enter_context(naming_ranks())
            for model in trained:
                for prepare in model.before_steps:
                    prepare()
            for each in optimizer.peers:
                stack.enter_context(each.accepting_gradients())
            for each in others:
                stack.enter_context(each.accepting_gradients(optimizer.loss_scale.value))
            reducers, of_others = ([each.reducer for each in every] for every in (optimizer.peers, others))
            counts = stack.enter_context(counting(reducers, of_others, count))
            for model in models:
                stack.enter_context(model.user_loop.losses.of(kind))
                for around in model.around_losses:
                    stack.enter_context(around(Pass(PassKind.BACKWARD)))
            if counts is None:
                share = arithmetic.mean_over_replicas(loss, self.grid.size(DP_CP), optimizer.loss_scale.value)
            else:
                share = arithmetic.share_of_counted(loss, counts.divisor, optimizer.loss_scale.value)
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
            checks.check_loss(loss.detach(), self.grid)
            self.labels.check_factor(loss, kind is LossKind.MEAN_OF_ROWS)
            if count is not None:
                checks.check_loss(torch.as_tensor(count).detach(), self.grid, "count of the loss")
            if synchronises:
                checks.check_kind(kind, self.grid)
