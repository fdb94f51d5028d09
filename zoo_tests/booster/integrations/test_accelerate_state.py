"""`save_state`, `load_state` and `save_model`: a run that is stopped goes on as if it had not been, in another layout.

What breaks here first: the order of samples of a resumed epoch. Look in `booster/integrations/accelerate_state.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from transformers import BertForSequenceClassification

from booster.errors import ConfigurationError
from booster.integrations.accelerate import Accelerator
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.accelerate_loop import LAYOUTS, bert, collate, fresh_accelerate, loader, samples
from zoo_tests.harness.ranks import distributed, run_on_ranks

_EXACT = {"rtol": 1e-9, "atol": 1e-11}
_BATCH = 4  # over all replicas


class Counter:
    """An object that a script registers."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Script:
    """A training script; `accelerator` is accelerate's own, or ours."""

    def __init__(self, accelerator: Any, replicas: int = 1) -> None:
        self.accelerator, self.counter = accelerator, Counter()
        model = bert(torch.float64)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        # Counted over all replicas; the number of steps so far says when the rate changes.
        scheduler = StepLR(optimizer, 3 * replicas, gamma=0.5)
        torch.manual_seed(3)
        batches = loader(22, _BATCH // replicas, shuffle=True, generator=torch.Generator().manual_seed(5))
        self.model, self.optimizer, self.batches, self.evaluated, self.scheduler = accelerator.prepare(
            model, optimizer, batches, loader(6, 2), scheduler
        )
        accelerator.register_for_checkpointing(self.counter)

    def steps(self, batches: Iterable[Any], most: int | None = None) -> list[float]:
        """Losses of the batches, of `most` at most."""
        losses = []
        self.model.train()
        for number, batch in enumerate(batches):
            if number == most:
                break
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.value += 1
            losses.append(float(loss.detach()))
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def _script(layout: str, **options: Any) -> Script:
    plugin = HybridParallelPlugin(**LAYOUTS[layout][1])
    return Script(Accelerator(plugin=plugin, **options), plugin.dp_size)


def _uninterrupted() -> tuple[list[float], dict[str, torch.Tensor]]:
    with fresh_accelerate():
        script = Script(accelerate.Accelerator(cpu=True))
        losses = [*script.steps(script.batches), *script.steps(script.batches)]
        return losses, script.weights()


def _stopped(layout: str, folder: str) -> list[float]:
    """Save in the middle of the second epoch, after a look at the loader of evaluation."""
    with fresh_accelerate():
        script = _script(layout)
        losses = script.steps(script.batches)
        next(iter(script.evaluated))
        losses += script.steps(script.batches, 2)
        assert script.accelerator.save_state(folder) == folder
        script.steps(script.batches)  # which the state does not hold
        return losses


def _resumed(layout: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    with fresh_accelerate():
        script = _script(layout)
        script.accelerator.load_state(folder)
        assert script.counter.value == 8
        script.steps([])
        losses = script.steps(script.accelerator.skip_first_batches(script.batches, 2))
        return losses, script.weights(), script.counter.value


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("tp2", "dp2"), ("dp2", "pp2"), ("pp2", "tp2")])
def test_a_run_goes_on_in_another_layout(before: str, after: str, tmp_path: Path) -> None:
    losses, weights = _uninterrupted()
    first = run_on_ranks(2, _stopped, before, str(tmp_path / "state"))[0]
    second, found, counted = run_on_ranks(2, _resumed, after, str(tmp_path / "state"))[1]
    torch.testing.assert_close(first + second, losses, **_EXACT)
    torch.testing.assert_close(found, weights, **_EXACT)
    assert counted == len(losses) == 12


def _without_skipping(folder: str) -> None:
    """As in plain accelerate, an epoch begins again; the order of its samples is the same."""
    with fresh_accelerate():
        script = _script("dp2")
        batches = iter(script.batches)
        seen = [next(batches)["input_ids"], next(batches)["input_ids"]]
        script.accelerator.save_state(folder)
        script.accelerator.load_state(folder)
        again = [batch["input_ids"] for batch in script.batches]
        assert len(again) == 6 and all(torch.equal(*pair) for pair in zip(seen, again[:2], strict=True))
        script.accelerator.dataloader_config.use_stateful_dataloader = True
        script.accelerator.load_state(folder)
        rest = [batch["input_ids"] for batch in script.batches]
        assert len(rest) == 4 and all(torch.equal(*pair) for pair in zip(rest, again[2:], strict=True))


def test_a_loader_that_is_not_stateful_begins_its_epoch_again(tmp_path: Path) -> None:
    run_on_ranks(2, _without_skipping, str(tmp_path / "state"))


def _automatic(folder: str) -> None:
    with fresh_accelerate():
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        script = _script("tp2", project_config=project)
        with pytest.raises(ConfigurationError, match=r"load_state\(\) finds no checkpoint in .*; give the"):
            script.accelerator.load_state()
        for count in range(3):
            script.counter.value = date(2026, 1, count + 1), torch.full((2, 300), count)
            script.accelerator.save_state()
        script.accelerator.load_state()
        day, large = script.counter.value
        assert (day, large.tolist()) == (date(2026, 1, 3), [[2] * 300] * 2) and script.accelerator.save_iteration == 3
        script.accelerator.project_configuration.iteration = 2
        with pytest.raises(ConfigurationError, match=r"checkpoint_2 exists already; set .*iteration to the"):
            script.accelerator.save_state()


def test_folders_are_named_and_the_oldest_removed(tmp_path: Path) -> None:
    run_on_ranks(2, _automatic, str(tmp_path))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"checkpoint_1", "checkpoint_2"}


def _many(accelerator: Accelerator) -> tuple[Any, ...]:
    teacher, student, other = bert(seed=2), bert(), bert(seed=3, num_hidden_layers=3)
    first, second = SGD(student.parameters(), lr=0.1, momentum=0.9), AdamW(other.parameters(), lr=0.1)
    one, two, three = StepLR(first, 1), StepLR(second, 2), ReduceLROnPlateau(second)
    return accelerator.prepare(teacher, student, other, first, second, one, two, three)


def _several(folder: str) -> None:
    with fresh_accelerate():
        accelerator = Accelerator(plugin=HybridParallelPlugin(tp_size=2))
        teacher, student, other, first, second, one, *_ = _many(accelerator)
        batch = collate(samples(3))
        accelerator.backward(student(**batch).loss + other(**batch).loss)
        for each in (first, second, one):
            each.step()
        accelerator.save_state(folder)
        expected = [accelerator.get_state_dict(model) for model in (teacher, student, other)]
        kept = [{name: value.clone() for name, value in each.items()} for each in expected]
        accelerator.free_memory()
        assert accelerator._models == accelerator._optimizers == accelerator._schedulers == []
        with pytest.raises(ConfigurationError, match=r"save_state\(\) and load_state\(\) find no model; prepare one"):
            accelerator.save_state(folder)
        models = _many(accelerator)
        with torch.no_grad():
            for model in models[:3]:
                next(model.parameters()).add_(1.0)
        accelerator.load_state(folder)
        for model, weights in zip(models[:3], kept, strict=True):
            torch.testing.assert_close(accelerator.get_state_dict(model), weights, rtol=0, atol=0)
        assert models[5].get_last_lr() == [0.1 * 0.1]
        accelerator.prepare(bert())
        with pytest.raises(ConfigurationError, match="is the state of 3 models, and the accelerator has 4"):
            accelerator.load_state(folder)


@pytest.mark.slow
def test_a_state_holds_several_models(tmp_path: Path) -> None:
    run_on_ranks(2, _several, str(tmp_path / "state"))


def _plateau(layout: str, folder: str, loads: bool) -> None:
    """Its state holds what it has seen of losses, by the batches of other replicas."""
    with fresh_accelerate():
        plugin = HybridParallelPlugin(**LAYOUTS[layout][1])
        accelerator = Accelerator(plugin=plugin)
        model = bert()
        optimizer = SGD(model.parameters(), lr=0.1)
        accelerator.prepare(model, optimizer, ReduceLROnPlateau(optimizer), loader(8, 4 // plugin.dp_size))
        if not loads:
            accelerator.save_state(folder)
            return
        with pytest.raises(ConfigurationError, match="a step of ReduceLROnPlateau stood for 2 times as many"):
            accelerator.load_state(folder)


def test_a_schedule_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    run_on_ranks(2, _plateau, "tp2", str(tmp_path / "state"), False)
    run_on_ranks(2, _plateau, "dp2", str(tmp_path / "state"), True)


class _Unsafe(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.state_dict}


@distributed(2)
def test_states_that_cannot_be_written_are_refused() -> None:
    with fresh_accelerate():
        script = _script("tp2")
        accelerator = script.accelerator
        for call, message in [
            (lambda: accelerator.save_state(), r"save_state\(\) got no folder; give one, or"),
            (lambda: accelerator.load_state(), r"load_state\(\) got no folder; give the one that save_state"),
            (lambda: accelerator.load_state("nowhere"), r"nowhere holds no state of save_state\(\)"),
            (lambda: accelerator.save_state("x", exclude_frozen=True), r"cannot take \['exclude_frozen'\] under a"),
            (lambda: accelerator.load_state("x", map_location="cpu"), r"cannot take \['map_location'\] under a layout"),
            (lambda: accelerator.register_save_state_pre_hook(print), r"call accelerator.save_model\(model, folder\)"),
            (lambda: accelerator.register_load_state_pre_hook(print), r"call accelerator.booster.load_model"),
            (
                lambda: accelerator.save_model(script.model, "x", safe_serialization=False),
                r"would write pickles; leave it out: the files are safetensors",
            ),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                call()
        accelerator.register_for_checkpointing(_Unsafe())
        with pytest.raises(ConfigurationError, match=r"registered _Unsafe\['value'\] is a method, which a checkpoint"):
            accelerator.save_state("x")


def _two_optimizers() -> None:
    with fresh_accelerate():
        accelerator = Accelerator(plugin=HybridParallelPlugin())
        model = bert()
        parts = [list(model.bert.parameters()), list(model.classifier.parameters())]
        accelerator.prepare(model, *(SGD(part, lr=0.1) for part in parts))
        with pytest.raises(ConfigurationError, match=r"take one optimizer of each model, and 2 are prepared with one"):
            accelerator.save_state("x")


def test_several_optimizers_of_a_model_are_not_saved() -> None:
    run_on_ranks(1, _two_optimizers)


def _export(layout: str, folder: str) -> None:
    with fresh_accelerate():
        script = _script(layout)
        accelerator, model = script.accelerator, script.model
        script.steps(script.batches, 1)
        accelerator.save_model(model, f"{folder}/all", max_shard_size=2000)
        whole = accelerator.get_state_dict(model)
        accelerator.save(whole, f"{folder}/whole.safetensors", safe_serialization=True)
        unwrapped = accelerator.unwrap_model(model)
        assert isinstance(unwrapped, BertForSequenceClassification)
        # The idiom of accelerate's own documentation.
        unwrapped.save_pretrained(
            f"{folder}/idiom",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        accelerator.wait_for_everyone()
        for name in ("all", "idiom"):
            opened = BertForSequenceClassification.from_pretrained(f"{folder}/{name}", dtype=torch.float64).state_dict()
            torch.testing.assert_close({key: opened[key] for key in whole}, whole, rtol=0, atol=0)
        if dist.get_rank() == 0:
            written = load_file(f"{folder}/whole.safetensors")
            assert set(written) == set(bert().state_dict())
            torch.save(whole, f"{folder}/whole.pt")
            assert torch.load(f"{folder}/whole.pt").keys() == whole.keys()  # as torch does by default, without classes
        plain = nn.Linear(2, 2)
        assert accelerator.unwrap_model(plain) is plain and set(accelerator.get_state_dict(plain)) == {"weight", "bias"}
        accelerator.save_model(plain, f"{folder}/plain")


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.slow), "dp2"])
def test_a_model_is_written_whole(layout: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_on_ranks(2, _export, layout, str(tmp_path))
    assert len(list((tmp_path / "all").glob("*.safetensors"))) > 1, "cut into files"
    assert (tmp_path / "plain" / "model.safetensors").exists()
