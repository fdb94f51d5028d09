"""The loss of one step, weighted globally.

A mean over the whole global batch is a sum over micro-batches and data-parallel ranks, divided once by the global
count. `HeadStepLoss` knows the counts before the step (they depend on labels alone) and divides each share by them;
`CriterionStepLoss` may learn them only afterwards and then says by what the reduced gradients have to be multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.mesh import HybridMesh
from plugins.hybrid_parallel.pipeline.microbatch import num_rows
from shardformer.context import ContextAxis
from shardformer.layers.head import deferred_logits, parallel_logits
from shardformer.losses import HeadLoss
from shardformer.losses.terms import IGNORE_INDEX

Microbatches = Sequence[Mapping[str, Any]]


class StepLoss:
    """The loss of one step.

    Args:
        microbatches: this replica's batch, cut; whole mappings, with labels.
        mesh: the grid of ranks.

    Attributes:
        reads_parallel_logits: whether it takes logits that are cut over the vocabulary.
        reads_parts: whether it takes outputs of this rank's part of each sequence.
        copies: context-parallel ranks that find the same, because they see whole sequences.
        own_entries: names of entries of the batch that it alone reads.
    """

    reads_parallel_logits = False
    reads_parts = False
    own_entries: Collection[str] = ()

    def __init__(self, microbatches: Microbatches, mesh: HybridMesh) -> None:
        self.microbatches, self.mesh = microbatches, mesh
        self.copies = mesh.size("cp")
        self.total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.shares: list[tuple[int, Tensor]] = []  # micro-batch -> what it added

    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> AbstractContextManager[None]:
        """How the heads of `model` leave their logits in a pass for this loss, whose outputs may be kept besides."""
        return parallel_logits(model) if self.reads_parallel_logits else nullcontext()

    def share(self, outputs: Any, index: int) -> Tensor | None:
        """What micro-batch `index` adds to the global loss (0-d, differentiable), on the last stage."""
        loss = self._share(outputs, index)
        if loss is not None:
            loss = loss if self.copies == 1 else loss / self.copies
            self.shares.append((index, loss.detach()))
            self.total += loss.detach()
        return loss

    def _share(self, outputs: Any, index: int) -> Tensor | None:
        raise NotImplementedError

    def finish(self, return_loss: bool) -> tuple[Tensor | None, Tensor | None]:
        """The global loss where asked for, and a factor for the gradients of this step where one is due."""
        return (self._sum_over_replicas(self.total) if return_loss else None), None

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        """Sum over stages (only the last has anything), data- and context-parallel ranks."""
        if dist.get_world_size(self.mesh.replica_group) > 1:
            dist.all_reduce(value, group=self.mesh.replica_group)
        return value

    def _sum_over_data(self, value: Tensor) -> Tensor:
        if self.mesh.size("dp") > 1:
            dist.all_reduce(value, group=self.mesh.group("dp"))
        return value


class NoLoss(StepLoss):
    """A pass that only wants outputs: the batch has no labels and there is no criterion."""

    def _share(self, outputs: Any, index: int) -> None:
        return None

    def finish(self, return_loss: bool) -> tuple[None, None]:
        return None, None


class HeadStepLoss(StepLoss):
    """The loss of the model's own head.

    Args:
        head_loss: its sums and counts.
        axis: over which the model leaves sequences cut; None where its outputs are of whole sequences.
    """

    reads_parallel_logits = True
    reads_parts = True

    def __init__(
        self, microbatches: Microbatches, mesh: HybridMesh, head_loss: HeadLoss, axis: ContextAxis | None = None
    ) -> None:
        super().__init__(microbatches, mesh)
        self.axis = axis
        if axis is not None:
            self.copies = 1
        if head_loss.couples_samples and (len(microbatches) > 1 or mesh.size("dp") > 1):
            raise ConfigurationError(
                f"a contrastive loss compares all samples of a batch, which is cut into {len(microbatches)} "
                f"micro-batches on each of dp_size={mesh.size('dp')} replicas; use num_microbatches=1 and dp_size=1"
            )
        self.head_loss = head_loss
        counts = torch.zeros(len(head_loss.terms), dtype=torch.float64, device=mesh.device)
        for microbatch in microbatches:
            counts += head_loss.counts(microbatch)
        self.global_counts = self._sum_over_data(counts)

    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> AbstractContextManager[None]:
        return parallel_logits(model) if keeps_outputs else deferred_logits(model)

    def _share(self, outputs: Any, index: int) -> Tensor:
        part = None if self.axis is None else partial(self.axis.take, fill=IGNORE_INDEX)
        return self.head_loss.weighted_sum(outputs, self.microbatches[index], self.global_counts, part)


class CriterionStepLoss(StepLoss):
    """The loss of a user's criterion: a mean over samples, or a (sum, count).

    Args:
        criterion: (outputs, batch) -> mean, or (sum, count). It may say what it reads by the attributes above.
    """

    def __init__(
        self, microbatches: Microbatches, mesh: HybridMesh, criterion: Callable[[Any, Mapping[str, Any]], Any]
    ) -> None:
        super().__init__(microbatches, mesh)
        self.criterion = criterion
        self.reads_parallel_logits = getattr(criterion, "reads_parallel_logits", False)
        self.own_entries = getattr(criterion, "own_entries", ())
        rows = sum(num_rows(microbatch) for microbatch in microbatches)
        self.global_rows = self._sum_over_data(torch.tensor(float(rows), dtype=torch.float64, device=mesh.device))
        self.count = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.counts_itself = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def _share(self, outputs: Any, index: int) -> Tensor:
        microbatch = self.microbatches[index]
        value = self.criterion(outputs, microbatch)
        if isinstance(value, tuple):
            value, count = value
            self.count += (count.detach() if isinstance(count, Tensor) else count) / self.copies
            self.counts_itself.fill_(1.0)
        else:
            value = value * num_rows(microbatch)
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise ConfigurationError(
                f"criterion returned {_describe(value)}; return a 0-d tensor (a mean over samples) or (sum, count)"
            )
        # The global count is not known yet where the criterion counts by itself: the number of samples keeps
        # gradients in range until `finish` corrects it.
        return value / self.global_rows.clamp(min=1.0).to(value.dtype)

    def finish(self, return_loss: bool) -> tuple[Tensor | None, Tensor | None]:
        sums = self._sum_over_replicas(torch.stack([self.total, self.count, self.counts_itself]))
        total, count, counts_itself = sums
        by_count = self.global_rows / count.clamp(min=torch.finfo(count.dtype).tiny)
        factor = torch.where(counts_itself > 0, torch.where(count > 0, by_count, 0.0), 1.0)
        return (total * factor if return_loss else None), factor


class ModelStepLoss(StepLoss):
    """The loss that an unknown model computes itself, taken as a mean over its samples."""

    def __init__(self, microbatches: Microbatches, mesh: HybridMesh) -> None:
        super().__init__(microbatches, mesh)
        rows = sum(num_rows(microbatch) for microbatch in microbatches)
        self.global_rows = self._sum_over_data(torch.tensor(float(rows), dtype=torch.float64, device=mesh.device))

    def _share(self, outputs: Any, index: int) -> Tensor:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None:
            raise ConfigurationError("the model returned no loss; give labels in the batch or a criterion")
        rows = num_rows(self.microbatches[index])
        return loss * (rows / self.global_rows.clamp(min=1.0)).to(loss.dtype)


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
