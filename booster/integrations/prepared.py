"""accelerate's wrappers of an optimizer and of a scheduler, around boosted ones."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import lr_scheduler

from booster.checkpoint import take_state
from booster.errors import ConfigurationError
from booster.wrappers import OptimizerWrapper

# Schedulers whose rate is a function of the number of their steps; all else in their state is what they were made with.
_COUNTING = (
    *(lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR, lr_scheduler.StepLR, lr_scheduler.MultiStepLR),
    *(lr_scheduler.ConstantLR, lr_scheduler.LinearLR, lr_scheduler.ExponentialLR, lr_scheduler.PolynomialLR),
    *(lr_scheduler.CosineAnnealingLR, lr_scheduler.OneCycleLR),
)


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper of an optimizer, which steps only where gradients are complete, around a boosted one.

    Args:
        optimizer: the boosted optimizer.
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
        scheduler: the user's scheduler.
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
            state: of the user's scheduler.
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
