"""The fp16 loss scale (Micikevicius et al., arXiv 1710.03740, section 3.2).

A model has one, which all of its optimizers share, as they would share a `torch.amp.GradScaler`: each leaves out its
own step where its own gradients overflow, and once all have stepped the scale shrinks if any of them overflowed.
"""

from __future__ import annotations

import math

_FLOOR = 1.0  # unscaled: gradients that overflow here do so by themselves


class LossScale:
    """No scaling: fp32 and bf16."""

    value = 1.0
    watches_overflow = False
    can_shrink = False

    def record(self, overflowed: bool) -> None:
        """Take note of one optimizer's step."""

    def update(self) -> None:
        """All optimizers that have gradients have stepped: choose the next scale; nothing where none has stepped."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a saved scale."""


class DynamicLossScale(LossScale):
    """Halves on an overflow, doubles after `growth_interval` steps without one.

    Args:
        initial_scale: the scale of the first step.
        growth_interval: steps without overflow before the scale doubles.
    """

    watches_overflow = True

    def __init__(self, initial_scale: float, growth_interval: int) -> None:
        self.value, self.growth_interval = float(initial_scale), growth_interval
        self.good_steps = 0
        self._overflowed: bool | None = None  # whether any step since the last update did; None where there was none

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may come from the scale; at its floor it does not."""
        return self.value > _FLOOR

    def record(self, overflowed: bool) -> None:
        self._overflowed = overflowed or bool(self._overflowed)

    def update(self) -> None:
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
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
