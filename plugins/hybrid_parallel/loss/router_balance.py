"""The auxiliary loss of routers on several stages, micro-batches and replicas.

Its derivative with respect to the scores of one micro-batch depends on the choices of all routers for all tokens. So
all forward passes run before any backward pass. Between the two, the sums of `RouterSums` are added over ranks; then
each stage adds the gradient of its own scores to that of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from shardformer.loss.routers import RouterLoss, RouterScores, RouterSums


class RouterBalance:
    """The auxiliary loss of one batch.

    Args:
        routers: computes sums of scores.
        scores: collects the scores of this rank's routers.
        masks: the attention mask of each micro-batch of this replica, [batch, seq] or None; none if its share is empty.
        mesh: the grid of ranks.

    Attributes:
        weight: gradient of the total with respect to the auxiliary loss; set before the backward passes.
    """

    def __init__(
        self, routers: RouterLoss, scores: RouterScores, masks: Sequence[Tensor | None], mesh: HybridMesh
    ) -> None:
        self._routers, self._scores, self._masks, self._mesh = routers, scores, masks, mesh
        self._parts: dict[tuple[int, int], RouterSums] = {}  # by stage and micro-batch
        self._total = routers.no_sums(mesh.device)
        self.weight: Tensor | float = 0.0

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
        mine = [self._routers.no_sums(self._mesh.device), *self._parts.values()]
        total = torch.stack([each.packed() for each in mine]).sum(0)
        if dist.get_world_size(self._mesh.replica_group) > 1:
            dist.all_reduce(total, group=self._mesh.replica_group)
        self._total = RouterSums.unpacked(total)
        return self._total.loss

    def root(self, stage: int, microbatch: int) -> Tensor | None:
        """Return a value (0-d) whose gradient is that of the loss, by the scores of one pass; None if there is none."""
        part = self._parts.pop((stage, microbatch), None)
        if part is None or not part.probabilities.requires_grad:
            return None
        return (self._total.derivatives * self.weight * part.probabilities).sum()
