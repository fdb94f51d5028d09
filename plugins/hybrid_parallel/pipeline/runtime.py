"""The runtime that executes a schedule's actions on this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from booster.errors import ConfigurationError
from booster.profiling import PIPELINE_MARK
from plugins.hybrid_parallel.data.microbatch import signature
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.pipeline.p2p import Channel, Links, PendingReceive, Specs, TensorSpec, connect, specs_of
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind, Schedule
from plugins.hybrid_parallel.pipeline.timeline import Turn, order_messages, split_at_backward
from shardformer.layers.parallel_module import defer_weight_grads
from shardformer.matmul.kernel import DeferredWeightGrads, WeightGradStore, autocast_dtype, run_deferred
from shardformer.peft import virtual_tokens
from shardformer.stages.placeholders import StageMessage
from shardformer.stages.stage import run_stage

if TYPE_CHECKING:
    from plugins.hybrid_parallel.features.nonfinite import ModuleWatch
    from plugins.hybrid_parallel.loss.step_loss import RouterBalance
    from plugins.hybrid_parallel.pipeline.timeline import ScheduleRecorder
    from plugins.hybrid_parallel.step.outputs import OutputGradients
    from plugins.hybrid_parallel.zero.reducer import BackwardPasses

    # (outputs, index of the micro-batch) -> what its backward pass starts from; None if there is none
    LossFunction = Callable[[Any, int], Tensor | OutputGradients | None]


class PipelineRuntime:
    """Runs micro-batches through the stages of this rank. A single stage is the simplest case of a pipeline.

    Args:
        schedule: the pipeline schedule, which also assigns stages to ranks.
        recorder: measures every action of training steps; None for no measurements.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: HybridMesh,
        schedule: Schedule = SCHEDULES["1f1b"],
        num_chunks: int = 1,
        recorder: ScheduleRecorder | None = None,
    ) -> None:
        self.module, self.mesh, self.schedule, self.recorder = module, mesh, schedule, recorder
        self.num_chunks, self.num_stages = num_chunks, num_chunks * mesh.size("pp")
        self.stages = schedule.stages_of(mesh.rank("pp"), mesh.size("pp"), num_chunks)
        self.has_last_stage = self.num_stages - 1 in self.stages
        self.rank_of_last_stage = mesh.stage_ranks[schedule.rank_of(self.num_stages - 1, mesh.size("pp"))]
        self.weight_grad_store = WeightGradStore() if schedule.splits_backward else None
        if self.weight_grad_store is not None:
            defer_weight_grads(module, self.weight_grad_store)
        is_cut = mesh.size("pp") * num_chunks > 1
        self.links = connect(mesh, schedule, num_chunks) if is_cut else {0: Links()}
        channels = [each for links in self.links.values() for each in (links.activations_out, links.gradients_out)]
        self._outgoing = [channel for channel in channels if channel is not None]
        self._turns: dict[tuple[int, bool], list[Turn]] = {}
        self._phases: dict[int, tuple[list[Turn], list[Turn]]] = {}
        self.microbatch_hooks: list[Callable[[int], None]] = []

    def turns(self, num_microbatches: int, trains: bool) -> list[Turn]:
        """Return the turns of this rank for a batch of `num_microbatches` micro-batches."""
        sizes = num_microbatches, trains
        if sizes not in self._turns:
            make = self.schedule.actions if trains else self.schedule.forward_only
            num_ranks = self.mesh.size("pp")
            tables = [make(rank, num_ranks, num_microbatches, self.num_chunks) for rank in range(num_ranks)]
            self._turns[sizes] = order_messages(tables)[self.mesh.rank("pp")]
        return self._turns[sizes]

    def phases(self, num_microbatches: int) -> tuple[list[Turn], list[Turn]]:
        """Return the turns of this rank for all forwards of a batch, and for all backwards that may follow later."""
        if num_microbatches not in self._phases:
            num_ranks, sizes = self.mesh.size("pp"), (num_microbatches, self.num_chunks)
            tables = [
                self.schedule.forward_only(rank, num_ranks, *sizes)
                + self.schedule.backward_only(rank, num_ranks, *sizes)
                for rank in range(num_ranks)
            ]
            self._phases[num_microbatches] = split_at_backward(order_messages(tables)[self.mesh.rank("pp")])
        return self._phases[num_microbatches]

    def register_microbatch_hook(self, hook: Callable[[int], None]) -> None:
        """Call `hook(index of the micro-batch)` before either direction of each micro-batch."""
        self.microbatch_hooks.append(hook)

    def begin_microbatch(self, index: int) -> None:
        """Call the hooks of a micro-batch."""
        for hook in self.microbatch_hooks:
            hook(index)

    @cached_property
    def stage_parameters(self) -> dict[int, frozenset[nn.Parameter]]:
        """The parameters of each stage of this rank."""
        found = {}
        for stage in self.stages:
            with self.viewing(stage):
                found[stage] = frozenset(self.module.parameters())
        return found

    @property
    def dtype(self) -> torch.dtype | None:
        """Precision of the weights by now; a model that is not trained may be converted after `boost`."""
        return next((param.dtype for param in self.module.parameters() if param.is_floating_point()), None)

    def viewing(self, stage: int) -> AbstractContextManager[None]:
        """Return a context in which the module has the modules of a stage of this rank."""
        views = getattr(self.module, "stage_views", None)
        return views.running(stage, None) if views is not None else nullcontext()

    def flush(self) -> None:
        """Wait until everything that this rank's stages sent has been received."""
        for channel in self._outgoing:
            channel.flush()

    def release_sent(self) -> None:
        """Release the tensors whose sends are complete, without waiting for the others."""
        for channel in self._outgoing:
            channel.release()


class StepTrace:
    """Inputs and losses of the passes since the last step of an optimizer.

    Attributes:
        causes: yields a sentence for each part of the model that makes a step not finite on purpose.
        losses: for each pass, (micro-batch, share of the loss) pairs in the order of its backward passes.
        watch: observer of single modules, in debug mode.
    """

    def __init__(self) -> None:
        self.causes: Callable[[], Iterable[str]] = tuple
        self.microbatches: Sequence[Mapping[str, Any]] = ()
        self.losses: list[list[tuple[int, Tensor]]] = []
        self.watch: ModuleWatch | None = None
        self._is_over = False

    def begin(self, microbatches: Sequence[Mapping[str, Any]], losses: list[tuple[int, Tensor]]) -> None:
        """Begin a pass; `losses` is filled while it runs."""
        if self._is_over:
            self.losses, self._is_over = [], False
            if self.watch is not None:
                self.watch.forget()
        self.microbatches = microbatches
        self.losses.append(losses)
        if self.watch is not None:
            self.watch.begin_pass(len(self.losses) - 1)

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of an ordinary loop, in which a pass has one micro-batch."""
        if not self.losses or self._is_over:
            self.begin((), [])
        self.losses[-1].append((0, loss))

    def end_step(self) -> None:
        """Record that an optimizer takes its step; the data stays readable until the next pass begins."""
        self._is_over = True

    def accept(self) -> None:
        """Record that the step's gradients are finite."""
        if self.watch is not None:
            self.watch.accept()


class PassState:
    """State of one pass over a batch: posted receives, and forwards that wait for their backward pass.

    Args:
        microbatches: the model's inputs, one mapping per micro-batch.
        loss_function: maps the outputs of a micro-batch on the last stage to the value whose gradients are added.
        stage_loss: a loss of what happens inside stages; it needs all forward passes before any backward pass.
    """

    def __init__(
        self,
        runtime: PipelineRuntime,
        microbatches: Sequence[dict[str, Any]],
        loss_function: LossFunction,
        stage_loss: RouterBalance | None = None,
    ) -> None:
        self.runtime, self.microbatches, self.loss_function = runtime, microbatches, loss_function
        self.stage_loss = stage_loss
        # Keys that both sides of a message know; they also tell whether gradients come back, and in which precision.
        state = (
            torch.is_grad_enabled(),
            autocast_dtype(runtime.mesh.device),
            runtime.dtype,
            virtual_tokens(runtime.module) if hasattr(runtime.module, "peft_config") else 0,
        )
        self.keys = [(signature(microbatch), *state) for microbatch in microbatches]
        # Which parameters are trained up to the entry and the exit of a stage, as a number: freezing between two steps
        # changes whether gradients come back, which the neighbour cannot see.
        self.trained_before: dict[int, int] = {}
        self.trained_after: dict[int, int] = {}
        self.receives: dict[Action, PendingReceive] = {}  # prepared or posted
        self.unsent: Callable[[], None] | None = None  # sends the result of the last action
        # By stage and micro-batch:
        self.arrived: dict[tuple[int, int], list[Tensor]] = {}  # tensors whose gradients are sent back
        # Edges instead of tensors: an activation is freed as soon as it is sent.
        self.roots: dict[tuple[int, int], tuple[list[GradientEdge], Specs] | Tensor | OutputGradients | None] = {}
        self.deferred: dict[tuple[int, int], DeferredWeightGrads] = {}  # weight gradients still to be computed

    def prepare_receives(self, actions: Sequence[Action]) -> None:
        """Allocate the messages that `actions` wait for, up to the first whose specs are not known yet.

        A receive waits for the kernels that were launched before its message was allocated. So this comes before the
        action during which the message is to arrive.
        """
        for action in actions:
            if not self._knows_specs(action):
                return
            self.receives[action] = self._prepare(action)

    def post_receives(self, actions: Sequence[Action]) -> None:
        """Post the receives of the messages that `actions` wait for, in this order."""
        for action in actions:
            if action not in self.receives:
                self.receives[action] = self._prepare(action)
            self.receives[action].post()

    def _knows_specs(self, action: Action) -> bool:
        """Return whether the message that `action` waits for can be allocated without waiting for the neighbour."""
        if action.kind is not Kind.FORWARD:
            return (action.stage, action.microbatch) in self.roots
        if torch.is_grad_enabled() and action.stage not in self.trained_before:
            return False  # the number has yet to arrive
        source = self.runtime.links[action.stage].activations_in
        return source.knows(self._key_before(action.stage, action.microbatch))

    def _prepare(self, action: Action) -> PendingReceive:
        links, index = self.runtime.links[action.stage], action.microbatch
        if action.kind is Kind.FORWARD:
            return links.activations_in.prepare_receive(self._key_before(action.stage, index), index)
        _, specs = self.roots[action.stage, index]
        return links.gradients_in.prepare_receive(self.keys[index], index, specs)

    def execute(self, turns: Sequence[Turn], observer: BackwardPasses | None = None) -> None:
        """Execute some `turns` of this rank's schedule; `observer`: told of every backward action."""
        runtime, recorder = self.runtime, self.runtime.recorder
        last = {turn.action.stage: turn.action for turn in turns if turn.action.kind is not Kind.FORWARD}
        for position, turn in enumerate(turns):
            action = turn.action
            self.post_receives(turn.before_action)
            later = turns[position + 1].before_action if position + 1 < len(turns) else ()
            self.prepare_receives((*turn.before_send, *later))
            is_last = last.get(action.stage) is action
            observed = observer if action.kind is not Kind.FORWARD else None
            if observed is not None:
                observed.before(action, is_last)
            runtime.begin_microbatch(action.microbatch)
            message = self._message_for(action)
            timed = nullcontext() if recorder is None else recorder.action(action)
            with record_function(PIPELINE_MARK + action.title), timed, self._around(action):
                if action.kind is Kind.FORWARD:
                    self._forward(action, message)
                elif action.kind is Kind.BACKWARD_WEIGHT:
                    run_deferred(self.deferred.pop((action.stage, action.microbatch)))
                else:
                    self._backward(action, message)
            self.post_receives(turn.before_send)
            if self.unsent is not None:  # another stage needs the result
                self.unsent()
                self.unsent = None
            runtime.release_sent()
            if observed is not None:
                observed.after(action, is_last)
        runtime.flush()

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        store = self.runtime.weight_grad_store
        with ExitStack() as stack:
            if action.kind is not Kind.FORWARD:  # outside autocast, like `loss.backward()` in an ordinary loop
                stack.enter_context(torch.autocast(self.runtime.mesh.device.type, enabled=False))
            if store is not None and action.kind is Kind.BACKWARD_INPUT:
                deferred = self.deferred.setdefault((action.stage, action.microbatch), [])
                stack.enter_context(store.split_backward(deferred))
            elif store is not None and action.kind is not Kind.BACKWARD_WEIGHT:  # a backward pass may recompute layers
                stack.enter_context(store.split_backward(None))
            yield

    def _message_for(self, action: Action) -> StageMessage | None:
        """Wait for the message that `action` needs, if it needs one."""
        if action in self.receives:
            return self.receives.pop(action).wait()
        links = self.runtime.links[action.stage]
        source = links.activations_in if action.kind is Kind.FORWARD else links.gradients_in
        needs_none = source is None or action.kind is Kind.BACKWARD_WEIGHT
        return None if needs_none else source.wait()  # from another stage of this rank

    def _forward(self, action: Action, message: StageMessage | None) -> None:
        runtime, index = self.runtime, action.microbatch
        links, trains = runtime.links[action.stage], torch.is_grad_enabled()
        if message is not None and trains:
            specs = links.activations_in.specs(self._key_before(action.stage, index))
            self.arrived[action.stage, index] = [
                tensor.requires_grad_() for tensor, spec in zip(message, specs, strict=True) if _needs_grad(spec)
            ]
        with self.stage_loss.watching(action.stage, index) if self.stage_loss is not None else nullcontext():
            output = run_stage(runtime.module, message, self.microbatches[index], action.stage)
        if links.activations_out is None:
            self.roots[action.stage, index] = self.loss_function(output, index)
            return
        self.unsent = lambda: links.activations_out.send(output, self._key_after(action.stage, index))
        if trains:
            differentiable = [tensor for tensor in output if tensor is not None and tensor.requires_grad]
            edges = [get_gradient_edge(tensor) for tensor in differentiable]
            self.roots[action.stage, index] = (edges, specs_of(differentiable))

    def _key_before(self, stage: int, index: int) -> tuple:
        """Return the key, known to both sides, of the message that a stage receives for a micro-batch."""
        if stage not in self.trained_before:
            source = self.runtime.links[stage].activations_in
            if not torch.is_grad_enabled():
                number = 0
            elif isinstance(source, Channel):
                number = source.receive_number()
            else:
                number = self.trained_after[stage - 1]
            self.trained_before[stage] = number
        return (*self.keys[index], self.trained_before[stage])

    def _key_after(self, stage: int, index: int) -> tuple:
        """Return the key, known to both sides, of the message that a stage sends for a micro-batch."""
        if stage not in self.trained_after:
            target = self.runtime.links[stage].activations_out
            flags = [param.requires_grad for param in self.runtime.stage_parameters[stage]]
            number = hash((self.trained_before.get(stage, 0), *flags)) if torch.is_grad_enabled() else 0
            if isinstance(target, Channel) and torch.is_grad_enabled():
                target.send_number(number)
            self.trained_after[stage] = number
        return (*self.keys[index], self.trained_after[stage])

    def _backward(self, action: Action, grads: StageMessage | None) -> None:
        index, links = action.microbatch, self.runtime.links[action.stage]
        root = self.roots.pop((action.stage, index))
        further = None if self.stage_loss is None else self.stage_loss.root(action.stage, index)
        starts = [] if further is None else [(further, None)]
        if links.gradients_in is None:
            starts += _starts_of(root, is_alone=further is None)
        else:
            edges, _ = root
            starts += zip(edges, grads, strict=True) if edges else ()
        if starts:
            torch.autograd.backward(*zip(*starts, strict=True))
        if links.gradients_out is not None:
            arrived = self.arrived.pop((action.stage, index))
            links.gradients_out.mark_known(self.keys[index], specs_of(arrived))
            grads = tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in arrived)
            self.unsent = lambda: links.gradients_out.send(grads, self.keys[index])


def _starts_of(root: Tensor | OutputGradients, is_alone: bool) -> list[tuple[Tensor, Tensor | None]]:
    """Return what the backward pass of the last stage starts from; `is_alone`: unless a stage loss adds gradients."""
    if is_alone and not root.requires_grad:
        raise ConfigurationError(
            "the loss depends on no parameter that takes gradients (all have requires_grad=False); unfreeze some, or "
            "call booster.execute_pipeline without optimizer= to evaluate"
        )
    if not isinstance(root, Tensor):
        return root.pairs()
    return [(root, None)] if root.requires_grad else []


def _needs_grad(spec: TensorSpec | None) -> bool:
    return spec is not None and spec.needs_grad
