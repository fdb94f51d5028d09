"""Boosted loaders, optimizers and schedulers as accelerate's loops expect them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from booster.errors import ConfigurationError
from booster.plugin import take_state
from booster.wrappers import OptimizerWrapper


def skipping(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    """Return accelerate's `skip_first_batches`, which rebuilds a loader from its parts, for boosted loaders as well."""

    @wraps(rebuild)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        skip = dataloader.skip if isinstance(dataloader, PreparedLoader) else partial(rebuild, dataloader)
        return skip(num_batches)

    return skip_first_batches


class PreparedLoader:
    """Loader of one replica's share of each global batch; it tells accelerate which batch is the last.

    Args:
        gradient_state: where accelerate keeps the loader under way.

    Attributes:
        end_of_dataloader: whether the batch at hand is the last of the epoch.
        remainder: samples of a short last global batch; 0 if it is full, -1 if that is unknown.
        draws_as_plain: whether each iteration draws a number from torch's generator, as plain loaders do, also after a
            script has drawn from it, as where it samples tokens.
    """

    draws_as_plain = False

    def __init__(self, loader: Any, gradient_state: GradientState) -> None:
        self.loader, self.gradient_state = loader, gradient_state
        self.end_of_dataloader, self.remainder = False, -1
        self._to_skip = 0

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch."""
        return self.loader.global_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.loader.dataset)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(self.loader.epoch)  # as accelerate's loaders do
        # After `set_epoch`, which starts an epoch from its beginning.
        if self._to_skip:
            self.loader.skip_batches, self._to_skip = self._to_skip, 0
        self.end_of_dataloader = False
        self.remainder = self._samples_of_short_batch()
        self.gradient_state._add_dataloader(self)
        try:
            yield from self._batches()
        finally:
            self.gradient_state._remove_dataloader(self)

    def _samples_of_short_batch(self) -> int:
        batches = self.loader.batch_sampler
        if self.loader.batch_size is None or getattr(batches, "drop_last", self.loader.drop_last):
            return -1
        try:
            # A sampler may draw more or fewer samples than the dataset has.
            samples = len(getattr(batches, "sampler", self.loader.dataset))
        except TypeError:
            return -1
        return samples % self.total_batch_size

    def _batches(self) -> Iterator[Any]:
        try:
            length = len(self.loader)
        except TypeError:
            yield from self._one_ahead()
            return
        for batch in self._begun():
            self.end_of_dataloader = self.loader.position in (0, length)
            yield batch

    def _begun(self) -> Iterator[Any]:
        before = torch.get_rng_state()
        batches = iter(self.loader)
        if self.draws_as_plain and torch.equal(before, torch.get_rng_state()):
            torch.empty((), dtype=torch.int64).random_()  # torch's seed of workers
        return batches

    def _one_ahead(self) -> Iterator[Any]:
        """Read a batch ahead of a dataset without length, to know the last one."""
        batches, end = self._begun(), object()
        batch = next(batches, end)
        while batch is not end:
            following = next(batches, end)
            self.end_of_dataloader = following is end
            yield batch
            batch = following

    def skip(self, num_batches: int) -> PreparedLoader:
        """Begin the next iteration after so many batches; return the loader itself."""
        self._to_skip = num_batches
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.loader.set_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any], continues: bool = True) -> None:
        """Load a `state_dict`; `continues`: from where it stopped, or its epoch again, in the same order."""
        self.loader.load_state_dict(state if continues else state | {"samples": 0, "order_to_come": None})

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class RowsOfReplica(PreparedLoader):
    """Loader of one replica's rows of endless batches, which have a row for each; a batch is read ahead.

    Args:
        batches: the same on all ranks.
        index: which replica this is.
    """

    def __init__(self, batches: Iterable[dict[str, Any]], gradient_state: GradientState, index: int) -> None:
        super().__init__(None, gradient_state)  # checkpoints hold no position in them
        self._rows_of_all, self._index = batches, index

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            for batch, _ in itertools.pairwise(self._rows_of_all):
                yield {name: value[self._index : self._index + 1] for name, value in batch.items()}
        finally:
            self.gradient_state._remove_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: a queue has no epochs."""


def split_by(loader: DataLoader, num_replicas: int) -> DataLoader:
    """Return the loader with an equal part of each batch for each replica, or raise a ConfigurationError."""
    if loader.batch_size is None or loader.batch_size % num_replicas:
        raise ConfigurationError(
            f"split_batches=True cannot split batch_size={loader.batch_size} into {num_replicas} equal parts, one for "
            f"each replica; use a multiple of {num_replicas}"
        )
    return rebuilt(loader, batch_size=loader.batch_size // num_replicas)


def seedable(sampler: RandomSampler, seed: int | None) -> SeedableRandomSampler:
    """Return accelerate's sampler of the same samples, whose order depends on the seed and the epoch."""
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )


def rebuilt(loader: DataLoader, sampler: Any = None, batch_size: int | None = None) -> DataLoader:
    """Return the same loader with another sampler or batch size."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    names += ("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")
    options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler if sampler is None else sampler
    size = loader.batch_size if batch_size is None else batch_size
    return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **options)


# Schedulers whose rate is a function of the number of their steps; all else in their state is what they were made with.
_COUNTING = (
    *(lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR, lr_scheduler.StepLR, lr_scheduler.MultiStepLR),
    *(lr_scheduler.ConstantLR, lr_scheduler.LinearLR, lr_scheduler.ExponentialLR, lr_scheduler.PolynomialLR),
    *(lr_scheduler.CosineAnnealingLR, lr_scheduler.OneCycleLR),
)


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper of an optimizer, which steps only where gradients are complete, around a boosted one.

    Args:
        model: the boosted model whose parameters it updates; None if that is unknown.
    """

    def __init__(self, optimizer: OptimizerWrapper, model: nn.Module | None = None) -> None:
        super().__init__(optimizer, device_placement=False)
        self.model = model

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, because gradients were not finite."""
        return bool(getattr(self.optimizer, "step_was_skipped", False))

    def is_of(self, scheduler: Any) -> bool:
        """Return whether a scheduler sets the learning rate of this optimizer, boosted or as it was before."""
        found = getattr(scheduler, "optimizer", None)
        inside = self.optimizer.unwrap() if isinstance(self.optimizer, OptimizerWrapper) else self.optimizer
        return found is not None and any(found is each for each in (self, self.optimizer, inside))


class ReplicaScheduler(AcceleratedScheduler):
    """accelerate's wrapper of a scheduler, with a replica for a process.

    Args:
        optimizers: those that must have stepped.
        step_with_optimizer: whether it steps only where the optimizers do.
        repeats: steps of the schedule for each step of the optimizer: a schedule counts the batches of one replica.
    """

    def __init__(self, scheduler: Any, optimizers: list[Any], step_with_optimizer: bool, repeats: int) -> None:
        # With `split_batches` one call is one step, whatever the number of processes.
        super().__init__(scheduler, optimizers, step_with_optimizer, split_batches=True)
        self.repeats = repeats

    def load(self, state: dict[str, Any], factor: float) -> None:
        """Load the state of a scheduler whose steps stood for other numbers of samples.

        Args:
            factor: steps of this schedule for a step of the saved one; 1 if they stand for the same.

        Raises:
            ConfigurationError: if such a state cannot be converted.
        """
        if factor == 1:
            take_state(self.scheduler, state, "scheduler")
            return
        steps = state["last_epoch"] * factor
        if not isinstance(self.scheduler, _COUNTING) or steps != int(steps):
            raise ConfigurationError(
                f"a step of {type(self.scheduler).__name__} stood for {factor:g} times as many samples when saved, "
                "which cannot be converted; use the same batch_size of a replica, or "
                "Accelerator(step_scheduler_with_optimizer=False), whose schedule counts calls of step()"
            )
        counts = {"last_epoch": int(steps), "_step_count": int(steps) + 1}
        kept = {name: state[name] for name in ("_last_lr", "base_lrs") if name in state}
        self.scheduler.load_state_dict(self.scheduler.state_dict() | kept | counts)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once for each batch of a replica, as a schedule that counts a single process' batches expects."""
        completes = self.step_with_optimizer and self.gradient_state.sync_gradients
        total = getattr(self.scheduler, "total_steps", None) if completes else None
        for _ in range(self.repeats if completes else 1):
            if total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)
