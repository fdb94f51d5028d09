"""The meter's figures in what a boosted Trainer logs, and thus in its trackers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from booster.meter import Meter


class MeterCallback(TrainerCallback):
    """Adds tokens and samples a second, utilization, memory and time left to each log of the training loss.

    Example:
        trainer = boosted(Trainer)(..., callbacks=[MeterCallback()], plugin=plugin)

    Args:
        options: options of `Meter`, such as `peak_flops`.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.meter = options, None

    def attach(self, plugin: Any, model: Any) -> None:
        """Count what passes through a boosted model from now on."""
        self.meter = Meter(plugin, model, bar=False, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the count of a run."""
        if self.meter is not None:
            self.meter.restart(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the number of steps."""
        if self.meter is not None:
            self.meter.current_step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make figures of a run that ends before its first log; all ranks call it."""
        if self.meter is not None and not self.meter.figures():
            self.meter.measure()

    def line(self) -> str:
        """Return the latest figures as one line of text; see `Meter.line`."""
        return "-" if self.meter is None else self.meter.line()

    def add_figures(self, logs: dict[str, float]) -> None:
        """Add the figures since the last log of a loss; all ranks call it."""
        if self.meter is not None and "loss" in logs:
            logs.update({**self.meter.measure(logs["loss"], logs.get("learning_rate")), **logs})
