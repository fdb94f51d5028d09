"""What Lightning is asked for and cannot hold under a layout: one sentence, the same on all ranks, and no hang."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks

from booster.errors import ConfigurationError
from zoo_tests.booster.integrations.lightning import jobs
from zoo_tests.harness.ranks import run_on_ranks, under_load

pytestmark = pytest.mark.slow


class OwnBackward(jobs.Job):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class OwnToggle(jobs.Job):
    def toggle_optimizer(self, optimizer: Any) -> None:
        super().toggle_optimizer(optimizer)


class TwoModels(jobs.Job):
    def __init__(self) -> None:
        super().__init__()
        self.other = jobs.bert()


class Loose(jobs.Job):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


class Constant(jobs.Job):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.tensor(1.0)


class NoOptimizer(jobs.Job):
    def configure_optimizers(self) -> None:
        return None


def _fit(folder: str, module: Any = None, given: dict[str, Any] | None = None, **fit: Any) -> None:
    made = jobs.trainer(folder, "tp2", max_epochs=1, **given or {})
    made.fit(module or jobs.Job(), jobs.loader(jobs.samples("bert", 8), "tp2"), **fit)


def _fabric(action: Callable[[Any, Any, Any], Any], **options: Any) -> None:
    fabric = lightning.Fabric(**{"accelerator": "cpu", "devices": 1, "strategy": jobs.strategy_of("tp2"), **options})
    fabric.launch()
    model = jobs.bert()
    action(fabric, model, torch.optim.SGD(model.parameters(), lr=0.1))


def _norm_of_another_kind(fabric: Any, model: Any, optimizer: Any) -> None:
    model, optimizer = fabric.setup(model, optimizer)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=0)


def _backward_of_a_model_without_optimizer(fabric: Any, model: Any, optimizer: Any) -> None:
    fabric.backward(torch.ones(1, requires_grad=True).sum())


# What is done, and a part of the sentence: the value, and what would do.
REFUSED: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "plugin": (
        lambda folder: _strategy_without_plugin(),
        ("HybridParallelStrategy() got no plugin", "plugin=HybridParallelPlugin(tp_size=2)"),
    ),
    "devices": (lambda folder: _fit(folder, given={"devices": 3}), ("devices=3", "booster run --nproc-per-node 3")),
    "precision": (
        lambda folder: _fit(folder, given={"precision": "16-true"}),
        ("precision='16-true'", "HybridParallelPlugin(precision='fp16')"),
    ),
    "double": (lambda folder: _fit(folder, given={"precision": "64-true"}), ("64-true", "dtype=torch.float64")),
    "batch norms": (
        lambda folder: _fit(folder, given={"sync_batchnorm": True}),
        ("sync_batchnorm=True", "leave it out"),
    ),
    "averages": (
        lambda folder: _fit(folder, given={"callbacks": (callbacks.StochasticWeightAveraging(1e-2),)}),
        ("StochasticWeightAveraging", "AveragedModel(self.model)"),
    ),
    **{
        kind.__name__: (
            lambda folder, kind=kind, given=given: _fit(folder, given={"callbacks": (kind(*given),)}),
            (kind.__name__, part),
        )
        for kind, given, part in (
            (callbacks.WeightAveraging, (), "AveragedModel(self.model)"),
            (callbacks.EMAWeightAveraging, (), "AveragedModel(self.model)"),
            (callbacks.ModelPruning, ("l1_unstructured",), "before training"),
            (callbacks.LearningRateFinder, (), "with a small model"),
            (callbacks.BatchSizeFinder, (), "booster plan"),
        )
    },
    "own toggle": (
        lambda folder: _fit(folder, OwnToggle()),
        ("OwnToggle has its own toggle_optimizer()", "leave it out"),
    ),
    "own backward": (lambda folder: _fit(folder, OwnBackward()), ("OwnBackward has its own backward()",)),
    "two models": (lambda folder: _fit(folder, TwoModels()), ("self.model and self.other", "requires_grad_(False)")),
    "loose weights": (lambda folder: _fit(folder, Loose()), ("Loose.scale lies outside", "move it into the model")),
    "constant loss": (lambda folder: _fit(folder, Constant()), ("does not depend on the boosted model", "self.model")),
    "no optimizer": (lambda folder: _fit(folder, NoOptimizer()), ("configure_optimizers() returned no optimizer",)),
    "no checkpoint": (
        lambda folder: _fit(folder, ckpt_path=str(Path(folder) / "none")),
        ("is no checkpoint of this strategy", "trainer.save_checkpoint()"),
    ),
    "optimizer alone": (
        lambda folder: _fabric(lambda fabric, model, optimizer: fabric.setup_optimizers(optimizer)),
        ("got a SGD without its model", "fabric.setup(model, optimizer)"),
    ),
    "another norm": (lambda folder: _fabric(_norm_of_another_kind), ("norm_type=0", "use a number above 0")),
    "backward": (
        lambda folder: _fabric(_backward_of_a_model_without_optimizer),
        ("finds no optimizer", "fabric.setup(model, optimizer)"),
    ),
}


def _strategy_without_plugin() -> None:
    from booster.integrations.lightning import HybridParallelStrategy

    HybridParallelStrategy()


def _messages(folder: str) -> dict[str, str]:
    found = {}
    for name, (action, _) in REFUSED.items():
        try:
            action(folder)
        except ConfigurationError as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "not refused"
    return found


def test_what_cannot_hold_is_refused_on_all_ranks(tmp_path: Path) -> None:
    messages, others = run_on_ranks(2, _messages, str(tmp_path))
    assert others == messages
    wrong = {
        name: messages[name]
        for name, (_, parts) in REFUSED.items()
        if "\n" in messages[name] or not all(part in messages[name] for part in parts)
    }
    assert not wrong, wrong


@pytest.mark.parametrize(("found", "sentence"), [(None, "is not installed"), ("2.1.4", "2.1.4 is installed")])
def test_lightning_that_is_missing_or_old(found: str | None, sentence: str) -> None:
    text = (
        "import importlib.metadata as metadata\n"
        "def version(name):\n"
        f"    if {found!r} is None: raise metadata.PackageNotFoundError(name)\n"
        f"    return {found!r}\n"
        "metadata.version = version\n"
        "from booster.errors import ConfigurationError\n"
        "try:\n"
        "    from booster.integrations.lightning import HybridParallelStrategy\n"
        "except ConfigurationError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=under_load(120))
    assert sentence in done.stdout, done.stderr
    assert "pip install 'lightning>=2.6'" in done.stdout and done.stdout.count("\n") == 1
