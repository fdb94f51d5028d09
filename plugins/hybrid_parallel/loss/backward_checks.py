"""Refusal of backward passes whose gradients would differ from those of the global batch, and warnings of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import SumOverReplicas, nodes_of
from shardformer.layers.parallel_module import hook_gradient
from shardformer.loss.terms import IGNORE_INDEX
from shardformer.shard_spec import grad_group_of

if TYPE_CHECKING:
    from plugins.hybrid_parallel.step.user_loop import UserLoop

_log = get_logger(__name__)

_COMPARED_PASSES = 100  # backward passes whose labels are counted at most: each waits for a GPU
_MEAN = 1  # reduction="mean", as torch numbers it
_MEANS_OF_LABELS = ("NllLossBackward0", "NllLoss2DBackward0")


def refuse_backward(model: nn.Module) -> None:
    """Refuse backward passes into a model without an optimizer: nothing would sum its gradients over ranks."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            hook_gradient(parameter, refuse_without_optimizer)


def check_weights_in_loss(loss: Tensor) -> None:
    """Refuse a loss that reads, besides the model's outputs, a weight whose gradient tensor-parallel ranks sum.

    Under sequence parallelism such a weight (of a norm, say) serves this rank's tokens alone, so its gradient is a
    partial sum; but all ranks read the whole weight, and would count a penalty on it once each. The outputs reach the
    weight through a collective of ours, a function in Python, at which the search ends.

    Raises:
        ConfigurationError: if the loss reads one; raised on all ranks, which compute the same loss.
    """
    for node in nodes_of(loss):
        weight = getattr(node, "variable", None)  # of a leaf of the graph
        if weight is not None and grad_group_of(weight) is not None:
            raise ConfigurationError(
                f"the loss reads a weight of shape {list(weight.shape)} besides the model's outputs, and under "
                "sequence parallelism each tensor-parallel rank would count it; compute it from the model's outputs (a "
                "penalty on weights is the optimizer's weight_decay)"
            )


class LabelCounts:
    """Says once where a mean over labels is not that of the global batch, because replicas have other counts a row.

    The number of labels is that of torch's cross entropy in the loss, or else of the labels that the model was given.
    So it does where a script multiplies its loss by the number of processes, which it does not need here.
    """

    def __init__(self, mesh: HybridMesh) -> None:
        self._mesh = mesh
        self._passes_left = _COMPARED_PASSES if mesh.size("dp") > 1 else 0
        self._is_factor_known = False

    def check_factor(self, loss: Tensor, by_rows: bool) -> None:
        """Say that a loss is multiplied by the number of ranks, or of replicas that count by their rows.

        Args:
            loss: of a script, 0-d.
            by_rows: whether replicas count by their rows.
        """
        ranks, replicas = dist.get_world_size(), self._mesh.size("dp")
        counted = {count for count, is_wrong in ((ranks, ranks != replicas), (replicas, by_rows)) if is_wrong} - {1}
        found = counted.intersection(_factors_of(loss))
        if found and not self._is_factor_known and dist.get_rank() == 0:
            _log.warning(
                "the loss is multiplied by %d, as by a number of processes (%d ranks, %d replicas); its gradients are "
                "those of all rows without it: leave it out, or read accelerator.num_processes after the model's call",
                *(found.pop(), ranks, replicas),
            )
            self._is_factor_known = True

    def compare(self, loss: Tensor, batch: UserLoop) -> None:
        """Compare the counts of all replicas; each of them must call this.

        Args:
            loss: a mean that the script has computed, 0-d.
            batch: what the model was called with last.
        """
        if not self._passes_left:
            return
        self._passes_left -= 1
        mine = torch.tensor([float(_labels_in(loss, batch.labels)), batch.rows], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._mesh.size("dp"))]
        dist.all_gather(everyone, mine, group=self._mesh.group("dp"))
        counts = sorted((labels / rows, labels, rows) for labels, rows in map(Tensor.tolist, everyone) if rows)
        if not counts or counts[0][0] == counts[-1][0]:
            return
        self._passes_left = 0
        if dist.get_rank() == 0:
            (_, least, rows_of_least), (_, most, rows_of_most) = counts[0], counts[-1]
            _log.warning(
                "one replica has %g labels in %d rows, and another %g in %d; replicas count by their rows, so that a "
                "mean over labels is not that of the global batch: booster.backward((sum, count), optimizer) is, with "
                "the sum over labels and their number",
                *(most, rows_of_most, least, rows_of_least),
            )


def _factors_of(loss: Tensor) -> Iterator[float]:
    """Yield the numbers that a script has multiplied its loss by, the last first."""
    node = loss.grad_fn
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        factor = node._saved_other
        if node.name() == "MulBackward0" and factor is not None and factor.dim() == 0 and factor.device.type == "cpu":
            yield float(factor)
        inputs = [each for each, _ in node.next_functions if each is not None]
        node = inputs[0] if len(inputs) == 1 else None


def _labels_in(loss: Tensor, labels: Any) -> Tensor | float:
    """Return the number of labels that this replica's loss is a mean over; 0 if it is none of the script's own."""
    counts, reads_loss = list[Tensor](), False
    for node in nodes_of(loss):
        if node.name() in _MEANS_OF_LABELS and node._saved_reduction == _MEAN:
            counts.append(node._saved_total_weight)
        reads_loss |= node.name() == f"{SumOverReplicas.__name__}Backward"
    if counts:
        return torch.stack([each.double() for each in counts]).sum()
    # Without the model's loss, the labels are there for the script's.
    is_counted = isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point()
    return (labels != IGNORE_INDEX).sum() if is_counted and not reads_loss else 0.0


def refuse_without_optimizer(gradient: Tensor) -> NoReturn:
    """Refuse a gradient of a model that has no optimizer."""
    raise ConfigurationError(
        "backward() reached a model that was boosted without its optimizer, so that nothing sums its gradients over "
        "ranks; use model, optimizer = booster.boost(model, optimizer) and booster.backward(loss, optimizer)"
    )
