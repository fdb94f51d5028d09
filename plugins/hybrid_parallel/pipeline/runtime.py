"""The runtime that executes a schedule's actions on this rank's stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plugins.hybrid_parallel.mesh import HybridMesh
from plugins.hybrid_parallel.pipeline.microbatch import signature
from plugins.hybrid_parallel.pipeline.p2p import Channel, PendingReceive, Specs, TensorSpec, specs_of
from plugins.hybrid_parallel.pipeline.schedule import Action, Kind
from shardformer.stage import run_stage

# (outputs, index of the micro-batch) -> its share of the loss, 0-d, or None when there is nothing to differentiate
LossFunction = Callable[[Any, int], Tensor | None]


class PipelineRuntime:
    """Runs micro-batches through one stage. A pipeline of one stage is the simplest case of it.

    Args:
        module: the model, cut to this stage.
        mesh: the grid of ranks.
    """

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        self.module = module
        stage, ranks = mesh.rank("pp"), mesh.stage_ranks
        self.is_first, self.is_last = stage == 0, stage == len(ranks) - 1

        def channel(neighbour: int, forward: bool) -> Channel | None:
            if not 0 <= neighbour < len(ranks):
                return None
            group = mesh.forward_group if forward else mesh.backward_group
            name = "the activation" if forward else "the gradient"
            return Channel(ranks[neighbour], group, mesh.device, name)

        self.activations_in, self.activations_out = channel(stage - 1, True), channel(stage + 1, True)
        self.gradients_in, self.gradients_out = channel(stage + 1, False), channel(stage - 1, False)

    def run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[dict[str, Any]],
        loss_function: LossFunction,
        scale: float,
        before_last_backward: Callable[[], None],
    ) -> None:
        """Execute `actions`.

        Args:
            actions: this stage's schedule.
            microbatches: the model's inputs, one mapping a micro-batch.
            loss_function: takes the outputs of a micro-batch on the last stage, returns its share of the loss.
            scale: factor on the loss in the backward pass (the fp16 loss scale).
            before_last_backward: called before the backward pass after which gradients are complete.
        """
        step = _Step(self, microbatches, loss_function, scale)
        last_backward = max((i for i, action in enumerate(actions) if action.kind is Kind.BACKWARD), default=-1)
        for position, action in enumerate(actions):
            step.post_receive(action)
            if position + 1 < len(actions):
                step.post_receive(actions[position + 1], only_if_known=True)
            if position == last_backward:
                before_last_backward()
            step.run(action)
        self.flush()

    def flush(self) -> None:
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.flush()

    def release_sent(self) -> None:
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.release()


class _Step:
    """The state of one run: what is on its way, and what waits for its backward pass."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        microbatches: Sequence[dict[str, Any]],
        loss_function: LossFunction,
        scale: float,
    ) -> None:
        self.runtime, self.microbatches = runtime, microbatches
        self.loss_function, self.scale = loss_function, scale
        # Whether gradients come back is part of what both sides know of a message.
        self.keys = [(signature(microbatch), torch.is_grad_enabled()) for microbatch in microbatches]
        self.posted: dict[Action, PendingReceive] = {}
        self.arrived: dict[int, list[Tensor]] = {}  # the tensors whose gradients go back
        # Edges instead of tensors: an activation is freed as soon as it is sent.
        self.roots: dict[int, tuple[list[GradientEdge], Specs] | Tensor | None] = {}

    def post_receive(self, action: Action, only_if_known: bool = False) -> None:
        """Post the receive that `action` waits for, if there is one."""
        if action in self.posted:
            return
        runtime, index = self.runtime, action.microbatch
        if action.kind is Kind.FORWARD and runtime.activations_in is not None:
            if not only_if_known or runtime.activations_in.knows(self.keys[index]):
                self.posted[action] = runtime.activations_in.post_receive(self.keys[index], index)
        elif action.kind is Kind.BACKWARD and runtime.gradients_in is not None and index in self.roots:
            _, specs = self.roots[index]
            self.posted[action] = runtime.gradients_in.post_receive(self.keys[index], index, specs)

    def run(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(action)
        else:
            self._backward(action)
        self.runtime.release_sent()

    def _forward(self, action: Action) -> None:
        runtime, index = self.runtime, action.microbatch
        key, trains = self.keys[index], torch.is_grad_enabled()
        message = None
        if not runtime.is_first:
            message = self.posted.pop(action).wait()
            if trains:
                specs = runtime.activations_in.specs(key)
                self.arrived[index] = [
                    tensor.requires_grad_() for tensor, spec in zip(message, specs, strict=True) if _needs_grad(spec)
                ]
        output = run_stage(runtime.module, message, self.microbatches[index])
        if runtime.is_last:
            self.roots[index] = self.loss_function(output, index)
            return
        runtime.activations_out.send(output, key)
        if trains:
            differentiable = [tensor for tensor in output if tensor is not None and tensor.requires_grad]
            edges = [get_gradient_edge(tensor) for tensor in differentiable]
            self.roots[index] = (edges, specs_of(differentiable))

    def _backward(self, action: Action) -> None:
        runtime, index = self.runtime, action.microbatch
        root = self.roots.pop(index)
        if runtime.is_last:
            (root * self.scale if self.scale != 1.0 else root).backward()
        else:
            edges, _ = root
            grads = self.posted.pop(action).wait()
            if edges:
                torch.autograd.backward(tuple(edges), grads)
        if not runtime.is_first:
            arrived = self.arrived.pop(index)
            runtime.gradients_out.mark_known(self.keys[index], specs_of(arrived))
            grads = tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in arrived)
            runtime.gradients_out.send(grads, self.keys[index])


def _needs_grad(spec: TensorSpec | None) -> bool:
    return spec is not None and spec.needs_grad
