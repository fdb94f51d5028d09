"""Refusal of backward passes whose gradients would differ from the gradients of the global batch."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from booster.errors import ConfigurationError
from shardformer.layers.partial_gradients import hook_gradient
from shardformer.shard_spec import grad_group_of


def refuse_backward(model: nn.Module) -> None:
    """Refuse backward passes into a model without an optimizer: nothing would sum its gradients over ranks."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            hook_gradient(parameter, _refuse)


def check_weights_in_loss(loss: Tensor) -> None:
    """Refuse a loss that reads, besides the model's outputs, a weight whose gradient tensor-parallel ranks sum.

    Under sequence parallelism such a weight (of a norm, say) serves this rank's tokens alone, so its gradient is a
    partial sum; but all ranks read the whole weight, and would count a penalty on it once each. The outputs reach the
    weight through a collective of ours, a function in Python, at which the search ends.

    Raises:
        ConfigurationError: if the loss reads one; raised on all ranks, which compute the same loss.
    """
    waiting: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or isinstance(node, BackwardCFunction):
            continue
        seen.add(node)
        weight = getattr(node, "variable", None)  # of a leaf of the graph
        if weight is not None and grad_group_of(weight) is not None:
            raise ConfigurationError(
                f"the loss reads a weight of shape {list(weight.shape)} besides the model's outputs, and under "
                "sequence parallelism each tensor-parallel rank would count it; compute it from the model's outputs (a "
                "penalty on weights is the optimizer's weight_decay)"
            )
        waiting += [following for following, _ in node.next_functions]


def _refuse(gradient: Tensor) -> NoReturn:
    raise ConfigurationError(
        "backward() reached a model that was boosted without its optimizer, so that nothing sums its gradients over "
        "ranks; use model, optimizer = booster.boost(model, optimizer) and booster.backward(loss, optimizer)"
    )
