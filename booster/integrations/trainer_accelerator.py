"""The Accelerator of a boosted Trainer: it knows the loss that the Trainer computes, and the Trainer's samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

from booster.integrations.accelerate import Accelerator
from booster.integrations.prepared_loader import PreparedLoader, RowsOfReplica
from booster.integrations.replicas import ReplicaMeans


@dataclass
class LossInProgress:
    """The loss of a batch that a Trainer computes."""

    rows: int | None  # samples of this replica; None if that is unknown
    items: Any = None  # the number of items of all replicas, as the Trainer's `compute_loss` gets it
    is_shared: bool = False  # whether the model computed it, as one loss of all replicas
    is_weighted: bool = False  # whether its mean over replicas is the loss of all of them
    read_processes: bool = False  # whether `accelerator.num_processes` was read, as by code for several processes
    # a zero that depends on the model's latest outputs, where this replica has no samples; else None
    nothing: Tensor | None = None
    # rows of each sample in what is gathered, in blocks: the first answers to all samples, then the second
    answers: int = 1


class Samples(list):
    """Labels in a list, an entry for each sample of this replica, as boxes of an image."""

    @staticmethod
    def among(labels: Any, rows: int | None) -> Any:
        """Return labels of so many samples, whose lists with an entry for each sample are marked."""
        if isinstance(labels, tuple):
            return tuple(Samples.among(each, rows) for each in labels)
        if isinstance(labels, list) and len(labels) == rows:
            return Samples(dict(each) if isinstance(each, Mapping) else each for each in labels)
        return labels


class CountedReplicas(PartialState):
    """accelerate's state of the job, whose number of processes is that of data-parallel replicas.

    A Trainer's arguments hold it, so that `args.world_size` is this number; `args.process_index` stays the rank, by
    which one of all ranks saves and logs.
    """

    counts_replicas = True

    def __init__(self, count: Callable[[], int]) -> None:
        # accelerate's own object shares its attributes with all others of its class.
        self.__dict__ = {name: value for name, value in PartialState().__dict__.items() if name != "num_processes"}
        self._count = count

    def __reduce__(self) -> tuple[type, tuple]:
        return PartialState, ()  # the arguments are saved, and may be opened in a job without a layout

    @property
    def num_processes(self) -> int:
        """Number of data-parallel replicas."""
        return self._count()


class TrainerAccelerator(Accelerator):
    """accelerate's Accelerator under a layout, as a Trainer needs it."""

    loss_in_progress: LossInProgress | None = None
    draws_as_plain = False  # of its loaders
    all_ranks_lead = False  # whether all of them run what one process does: programs outside are asked by one
    takes_rows = False  # whether its loaders have endless batches with a row for each replica

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first rank, or all of them lead."""
        return self.all_ranks_lead or super().is_main_process

    @property
    def num_processes(self) -> int:
        """Number of replicas, by which Trainer multiplies its share of a loss; 1 for a loss of all replicas."""
        progress = self.loss_in_progress
        if progress is not None:
            progress.read_processes = True
            if progress.is_shared:
                return 1
        return self.replicas.size

    def _watch_losses_of(self, model: nn.Module) -> None:
        """Do nothing: the Trainer's mixin watches them."""

    @contextmanager
    def computing_loss(self, progress: LossInProgress) -> Iterator[LossInProgress]:
        """Record in `progress` how a loss is computed. A nested computation overwrites the enclosing one's record."""
        outer, self.loss_in_progress = self.loss_in_progress, progress
        try:
            yield progress
        finally:
            self.loss_in_progress = outer
            if outer is not None:
                outer.is_weighted = True

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad tensors to the longest of all processes, except those of single samples."""
        if isinstance(tensor, tuple):
            return tuple(self.pad_across_processes(each, *args, **kwargs) for each in tensor)
        return tensor if isinstance(tensor, Samples) else super().pad_across_processes(tensor, *args, **kwargs)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return values of all replicas; a scalar of a loss's samples is one value a replica, none of which is cut.

        Lists of single samples are joined, where accelerate would join the first samples of all processes, and so on.
        """
        if isinstance(input_data, tuple) and any(isinstance(each, Samples) for each in input_data):
            return tuple(map(self.gather_for_metrics, input_data))
        if isinstance(input_data, Samples):
            return super().gather_for_metrics(list(input_data), use_gather_object=True)
        progress = self.loss_in_progress
        is_scalar = isinstance(input_data, Tensor) and input_data.dim() == 0
        if progress is None or not is_scalar or use_gather_object or self.replicas.size == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        values = self.replicas.gather(input_data)
        if progress.rows is None or not values.is_floating_point():
            return values
        return ReplicaMeans.of(values, self.replicas.gather(torch.tensor(progress.rows, device=values.device)))

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        """Return rows of all replicas in the order of one process, block by block where samples have several rows."""
        gather, progress = super()._gather_rows, self.loss_in_progress
        if progress is None or tensor.dim() == 0 or len(tensor) != progress.answers * (progress.rows or 0):
            return gather(tensor)
        return torch.cat([gather(block) for block in tensor.chunk(progress.answers)])

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> PreparedLoader:
        """Return a loader of this replica's share; samples of like lengths meet in batches of all replicas."""
        if self.takes_rows and isinstance(data_loader, DataLoader):
            return RowsOfReplica(data_loader, self.gradient_state, self.process_index)
        sampler = getattr(data_loader, "sampler", None)
        if isinstance(data_loader, DataLoader) and isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.replicas.size  # Trainer gave it that of one replica
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        loader.draws_as_plain = self.draws_as_plain
        # Trainer saves the training loader itself, and prepares one for each evaluation, which is let go after it.
        self._dataloaders.clear()
        return loader
