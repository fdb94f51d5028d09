"""What a boosted Trainer writes: checkpoints for any layout, and the meter's figures in its logs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from booster.errors import ConfigurationError
from booster.meter import Meter
from booster.wrappers import ModelWrapper
from shardformer.distributed.random import random_states, set_random_states

_STATE = "booster"  # folder of the training state in a checkpoint of Trainer


class TrainerCheckpoints:
    """Mixin of a Trainer: the state of a sharded model, its optimizer and its random numbers, on all ranks together."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face directory, on all ranks together, that plain `from_pretrained` opens."""
        if not isinstance(self.model, ModelWrapper):  # not trained yet: every rank has the whole model
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.accelerator.save_model(self.model, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _training_state(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer.optimizer, "lr_scheduler": self.lr_scheduler}
        return {kind: value for kind, value in state.items() if value is not None}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        loader = self._train_loader.loader
        self.accelerator.booster.save_checkpoint(Path(output_dir) / _STATE, **self._training_state(), dataloader=loader)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Refuse a checkpoint of another Trainer; the training state, which is loaded later, has the weights."""
        if not (Path(resume_from_checkpoint) / _STATE).is_dir():
            raise ConfigurationError(
                f"{resume_from_checkpoint} holds no training state of a boosted Trainer; start from its weights "
                f"instead, as in from_pretrained('{resume_from_checkpoint}'), without resume_from_checkpoint"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._training_state()
        if not self.args.ignore_data_skip:
            state["dataloader"] = self._train_loader.loader
        self.accelerator.booster.load_checkpoint(Path(checkpoint) / _STATE, **state)
        self._random_states = random_states()

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / _STATE).is_dir():
            self.accelerator.booster.load_checkpoint(best / _STATE, model=self.model)
        else:
            self.accelerator.booster.load_model(self.model, best)

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the training state has the random states of all ranks."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with the random numbers of the training state: the loader has drawn some since that was loaded."""
        if checkpoint is not None:
            set_random_states(self._random_states)


class MeterCallback(TrainerCallback):
    """Adds tokens and samples a second, utilization, memory and time left to each log of the training loss.

    Example:
        trainer = boosted(Trainer)(..., callbacks=[MeterCallback()], plugin=plugin)

    Args:
        options: options of `Meter`, such as `peak_flops`.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.meter = options, None
        self.training = ExitStack()  # of a trainer that generates: the time from its samples to the optimizer's step

    def attach(self, plugin: Any, model: Any) -> None:
        """Count what passes through a boosted model from now on."""
        self.meter = Meter(plugin, model, bar=False, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the count of a run."""
        if self.meter is not None:
            self.meter.restart(state.global_step, state.max_steps)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the time of training."""
        self.training.close()

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
