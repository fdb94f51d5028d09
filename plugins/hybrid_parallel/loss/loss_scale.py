"""The fp16 loss scale (Micikevicius et al., arXiv 1710.03740, section 3.2).

A model has one loss scale, which all of its optimizers share, as they would share a `torch.amp.GradScaler`. Each
optimizer skips its own step if its own gradients overflow. Once all have stepped, the scale shrinks if any overflowed.
"""

from __future__ import annotations

import math

_FLOOR = 1.0  # no scaling: gradients that overflow at this scale overflow by themselves


class LossScale:
    """Constant scale of 1, for fp32 and bf16."""

    value = 1.0
    watches_overflow = False
    can_shrink = False

    def record(self, overflowed: bool) -> None:
        """Record whether one optimizer's step overflowed."""

    def update(self) -> None:
        """Choose the next scale, after all optimizers with gradients have stepped; do nothing if none has stepped."""

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint saves of the scale; nothing for a constant one."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved scale."""


class DynamicLossScale(LossScale):
    """Scale that halves on an overflow and doubles after `growth_interval` steps without one.

    Args:
        initial_scale: the scale of the first step.
        growth_interval: steps without overflow before the scale doubles.
    """

    watches_overflow = True

    def __init__(self, initial_scale: float, growth_interval: int) -> None:
        self.value, self.growth_interval = float(initial_scale), growth_interval
        self.good_steps = 0
        self._overflowed: bool | None = None  # whether a step since the last update overflowed; None without steps

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may come from the scale; at its floor it does not."""
        return self.value > _FLOOR

    def record(self, overflowed: bool) -> None:
        """Record whether one optimizer's step overflowed."""
        self._overflowed = overflowed or bool(self._overflowed)

    def update(self) -> None:
        """Choose the next scale, after all optimizers with gradients have stepped; do nothing if none has stepped."""
        overflowed, self._overflowed = self._overflowed, None
        if overflowed is None:
            return
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, _FLOOR), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            doubled = self.value * 2
            self.value, self.good_steps = (doubled if math.isfinite(doubled) else self.value), 0

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the number of good steps, for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved scale; keep the present one if the checkpoint has none."""
        if state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
