"""The auxiliary loss of routers on several stages, micro-batches, replicas and parts of sequences.

Its derivative with respect to the scores of one micro-batch depends on the choices of all routers for all tokens. So
all forward passes run before any backward pass. Between the two, the sums of `RouterSums` are added over ranks; then
each stage adds the gradient of its own scores to that of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from shardformer.loss.terms import RouterLoss, RouterScores, RouterSums


class RouterBalance:
    """The auxiliary loss of one batch.

    Args:
        routers: computes sums of scores.
        scores: collects the scores of this rank's routers.
        masks: the attention mask of this rank's tokens in each micro-batch, [batch, seq/cp] or None; none if the share
            of this replica is empty.
        cuts_over_tp: whether tensor-parallel ranks route different tokens (`all_to_all` sequence parallelism).

    Attributes:
        weight: gradient of the total with respect to the auxiliary loss; set before the backward passes.
        latest: the auxiliary loss (0-d), once it is known.
    """

    def __init__(
        self,
        routers: RouterLoss,
        scores: RouterScores,
        masks: Sequence[Tensor | None],
        mesh: HybridMesh,
        cuts_over_tp: bool = False,
    ) -> None:
        self._routers, self._scores, self._masks, self._mesh = routers, scores, masks, mesh
        self._cuts_over_tp = cuts_over_tp
        self._parts: dict[tuple[int, int], RouterSums] = {}  # by stage and micro-batch
        self._total = routers.no_sums(mesh.device)
        self.weight: Tensor | float = 0.0
        self.latest: Tensor | None = None

    @property
    def factor(self) -> float:
        """Weight of the auxiliary loss in the model's loss."""
        return self._routers.factor

    @contextmanager
    def watching(self, stage: int, microbatch: int) -> Iterator[None]:
        """Collect the scores of a forward pass of one stage."""
        with self._scores.collecting() as scores:
            yield
        if scores and microbatch < len(self._masks):
            self._parts[stage, microbatch] = self._routers.sums(scores, self._masks[microbatch])

    def finish(self) -> Tensor:
        """Return the auxiliary loss of the global batch (0-d), on all ranks; call it after all forward passes."""
        return self._sum_over(self._mesh.replica_group)

    def share_of_batch(self) -> Tensor:
        """Return this rank's share of the weighted loss of the global batch (0-d), if it has one stage and one pass.

        Shares of data- and context-parallel ranks add up to the loss and to its gradient.
        """
        value, self.weight = self.finish() * self.factor, self.factor
        return self._with_gradient(value / self._mesh.size(DP_CP))

    def loss_of_replica(self) -> Tensor:
        """Return the auxiliary loss of this replica's batch (0-d), if it has one stage and one pass.

        The mean over context-parallel ranks, each of which has all of it, gives its gradient.
        """
        value, self.weight = self._sum_over(self._mesh.group("cp")), float(self._mesh.size("cp"))
        return self._with_gradient(value)

    def root(self, stage: int, microbatch: int) -> Tensor | None:
        """Return a value (0-d) whose gradient is that of the loss, by the scores of one pass; None if there is none."""
        part = self._parts.pop((stage, microbatch), None)
        if part is None or not part.probabilities.requires_grad:
            return None
        return (self._total.derivatives * self.weight * part.probabilities).sum()

    def _sum_over(self, group: ProcessGroup) -> Tensor:
        mine = [self._routers.no_sums(self._mesh.device), *self._parts.values()]
        total = torch.stack([each.packed() for each in mine]).sum(0)
        for each in (group, self._mesh.group("tp")) if self._cuts_over_tp else (group,):
            if dist.get_world_size(each) > 1:
                dist.all_reduce(total, group=each)
        self._total = RouterSums.unpacked(total)
        self.latest = self._total.loss
        return self.latest

    def _with_gradient(self, value: Tensor) -> Tensor:
        """Return `value` with the gradient of `root`, whose own value is another."""
        root = self.root(0, 0)
        return value if root is None else _OfSums.apply(root, value)


class _OfSums(torch.autograd.Function):
    """A value over all ranks, whose gradient each rank has by its own scores; a collective to those who search it."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, value: Tensor) -> Tensor:
        """Return `value`."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Send the gradient to `root`."""
        return grad, None
