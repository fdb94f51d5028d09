"""Runs of Lightning's Trainer besides a fit: with callbacks, evaluation alone, weights in callbacks, a second run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from booster.errors import ConfigurationError
from zoo_tests.booster.integrations.lightning import jobs


def watched(folder: str, layout: str | None) -> dict[str, Any]:
    """Fit with callbacks and a logger that write; then test and predict with the best checkpoint."""
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    best = ModelCheckpoint(
        Path(folder) / "kept", "{step}-{val_loss:.3f}", monitor="val_loss", save_top_k=1, save_last=True
    )
    rate = LearningRateMonitor("step")
    module = jobs.Job()
    logger = CSVLogger(folder, name="log", version="0")
    made = jobs.trainer(folder, layout, (stop, best, rate), max_epochs=6, logger=logger)
    torch.manual_seed(11)
    made.fit(
        module,
        jobs.loader(jobs.samples("bert", 18), layout, shuffle=True),
        jobs.loader(jobs.samples("bert", 7, 1), layout),
    )
    tested = made.test(module, jobs.loader(jobs.samples("bert", 9, 2), layout), ckpt_path="best", verbose=False)
    predicted = made.predict(module, jobs.loader(jobs.samples("bert", 8, 2), layout))
    return {
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),
        "stopped": (stop.stopped_epoch, made.current_epoch),
        "kept": sorted(path.name for path in (Path(folder) / "kept").iterdir()),
        "tested": tested,
        "predicted": torch.cat(predicted).tolist(),
        "log": (Path(folder) / "log" / "0" / "metrics.csv").read_text(),
    }


def evaluated(folder: str, layout: str | None) -> dict[str, Any]:
    """Validate, test and predict with a model that no fit has boosted, nor will."""
    module = jobs.Job(own_loss="both")
    made = jobs.trainer(folder, layout)
    validated = made.validate(module, jobs.loader(jobs.samples("bert", 7, 1), layout), verbose=False)
    tested = made.test(module, jobs.loader(jobs.samples("bert", 9, 2), layout), verbose=False)
    predicted = made.predict(module, jobs.loader(jobs.samples("bert", 7, 3), layout))
    return {"validated": validated, "tested": tested, "predicted": torch.cat(predicted).tolist()}


class Weights(Callback):
    """Asks for the weights in the middle of a fit; where it gets them, it changes them and loads them again."""

    def __init__(self) -> None:
        self.whole: dict[str, Any] = {}
        self.refused: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.refused.clear()
        strategy = trainer.strategy
        self.whole = strategy.whole_state_dict() if hasattr(strategy, "whole_state_dict") else module.state_dict()
        self.whole = {name: value.clone() for name, value in self.whole.items()}
        try:
            kept = {name: value.clone() for name, value in module.state_dict().items()}
        except ConfigurationError as error:
            self.refused.append(str(error))
        else:
            assert kept.keys() == self.whole.keys()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2.0)
        try:
            module.load_state_dict(self.whole)
        except ConfigurationError as error:
            self.refused.append(str(error))


def weights_in_callback(folder: str, layout: str | None) -> dict[str, Any]:
    """Fit for 3 steps with a callback that asks for the weights."""
    module, asked, history = jobs.Job(), Weights(), jobs.History()
    made = jobs.trainer(folder, layout, (asked, history), max_steps=3)
    made.fit(module, jobs.loader(jobs.samples("bert", 12), layout))
    return {"whole": asked.whole, "refused": asked.refused, "logs": history.logs}


def continued(
    folder: str, layout: str | None, steps: int, resume: str | None, save: str | None, kind: str = "automatic"
) -> dict[str, Any]:
    """Fit to a number of steps, from a checkpoint or from the start; save a checkpoint at the end."""
    history, module = jobs.History(), jobs.JOBS[kind]()
    made = jobs.trainer(folder, layout, (history,), max_steps=steps, max_epochs=9)
    torch.manual_seed(11)
    data = jobs.loader(jobs.samples("bert", 19), layout, shuffle=True)
    made.fit(module, data, ckpt_path=resume and str(Path(folder) / resume))
    if save:
        made.save_checkpoint(Path(folder) / save)
    return {"logs": history.logs, "weights": jobs.weights_of(made, module, Path(folder) / f"final-{layout}"), "seen": 0}
