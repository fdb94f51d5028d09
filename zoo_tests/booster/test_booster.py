"""Booster with a plugin of somebody else: the interface alone, no process group, no line of our plugin.

What breaks here first: the order of what `boost` returns, or a method that third parties would have to add. Look in
`booster/booster.py` and `booster/plugin.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, Dataset, TensorDataset

from booster import Booster, Plugin
from booster.errors import ConfigurationError
from booster.plugin import CheckpointIO, PipelineResult, TrainingObjects, available_plugins, load_plugin, take_state
from booster.wrappers import ModelWrapper, OptimizerWrapper


class SingleProcessPlugin(Plugin):
    """The smallest plugin: wraps what it gets and trains in this process."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.syncs = factor, True

    def configure(self, objects: TrainingObjects) -> TrainingObjects:
        return TrainingObjects(
            model=None if objects.model is None else ModelWrapper(objects.model),
            optimizers=[OptimizerWrapper(optim) for optim in objects.optimizers],
            lr_schedulers=objects.lr_schedulers,
            dataloaders=objects.dataloaders,
            criterion=objects.criterion,
        )

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer, by_rows: bool = True) -> None:
        (loss * self.factor).backward()

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None,
        optimizer: torch.optim.Optimizer | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> PipelineResult:
        batch = next(data_iter)
        outputs = model(batch["x"])
        loss = criterion(outputs, batch)
        if optimizer is not None:
            self.backward(loss, optimizer)
        return PipelineResult(loss.detach() if return_loss else None, outputs if return_outputs else None)

    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare_dataloader(self, dataset: Dataset, batch_size: int, **kwargs: Any) -> DataLoader:
        return DataLoader(dataset, batch_size=batch_size, **kwargs)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        raise NotImplementedError("this plugin does not save")


def mean_square(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return ((outputs - batch["y"]) ** 2).mean()


def _objects() -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR, DataLoader]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, LambdaLR(optimizer, lambda step: 0.5**step), DataLoader(TensorDataset(torch.ones(4, 3)))


def test_boost_returns_what_it_got_in_the_order_given() -> None:
    model, optimizer, scheduler, loader = _objects()
    booster = Booster(SingleProcessPlugin())
    boosted = booster.boost(mean_square, loader, scheduler, optimizer, model)
    assert boosted[:3] == (mean_square, loader, scheduler)
    assert boosted[3].unwrap() is optimizer and boosted[4].unwrap() is model


def test_one_object_comes_back_bare_and_keywords_in_their_order() -> None:
    model, optimizer, scheduler, loader = _objects()
    booster = Booster(SingleProcessPlugin())
    assert booster.boost(loader) is loader
    found = booster.boost(lr_scheduler=scheduler, dataloader=None, optimizer=optimizer, model=model)
    assert found[0] is scheduler and found[1] is None and found[2].unwrap() is optimizer and found[3].unwrap() is model


def test_several_optimizers_and_loaders_keep_their_places() -> None:
    model, optimizer, _, loader = _objects()
    second = torch.optim.SGD([model.bias], lr=1.0)
    other = DataLoader(TensorDataset(torch.ones(2)))
    found = Booster(SingleProcessPlugin()).boost(second, other, model, optimizer, loader)
    assert (found[0].unwrap(), found[1], found[3].unwrap(), found[4]) == (second, other, optimizer, loader)


def test_a_loss_module_is_a_criterion_and_a_plateau_scheduler_a_scheduler() -> None:
    model, optimizer, _, _ = _objects()
    plateau, criterion = ReduceLROnPlateau(optimizer), nn.CrossEntropyLoss()
    assert Booster(SingleProcessPlugin()).boost(model, optimizer, plateau, criterion)[2:] == (plateau, criterion)


def test_what_boost_refuses() -> None:
    booster, (model, *_) = Booster(SingleProcessPlugin()), _objects()
    with pytest.raises(ConfigurationError, match="got the keyword 'scheduler'; use model, optimizer, criterion"):
        booster.boost(scheduler=None)
    with pytest.raises(ConfigurationError, match="got 2 objects of the kind 'model'; give one"):
        booster.boost(model, nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="cannot take a int"):
        booster.boost(model, 3)
    with pytest.raises(AttributeError, match="Booster has no other$"):
        booster.other()


def test_a_third_partys_plugin_trains() -> None:
    model, optimizer, scheduler, _ = _objects()
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    batch = {"x": torch.randn(5, 3), "y": torch.randn(5, 1)}
    booster = Booster(SingleProcessPlugin(factor=2.0))
    model, optimizer, scheduler, _ = booster.boost(model, optimizer, scheduler, mean_square)
    result = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer, return_outputs=True)
    expected = mean_square(plain(batch["x"]), batch)
    expected.backward()
    torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(model.weight.grad, 2 * plain.weight.grad)
    optimizer.step(), scheduler.step(), optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.05 and model.weight.grad is None
    with booster.no_sync(model, optimizer):
        booster.backward(mean_square(model(batch["x"]), batch), optimizer)
    assert model.weight.grad is not None
    other = booster.execute_pipeline(iter([batch]), model, criterion=lambda outputs, _: outputs.sum() * 0)
    assert other.loss == 0.0, "the criterion of the call goes before that of boost()"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_wrappers_read_like_what_they_wrap() -> None:
    model, optimizer, scheduler, _ = _objects()
    wrapped, wrapped_optimizer = ModelWrapper(model), OptimizerWrapper(optimizer)
    assert wrapped.in_features == 3 and wrapped.weight is model.weight
    with pytest.raises(AttributeError, match="no_such"):
        _ = wrapped.no_such
    assert isinstance(wrapped_optimizer, torch.optim.Optimizer)
    assert wrapped_optimizer.param_groups is optimizer.param_groups and wrapped_optimizer.state is optimizer.state
    scheduler.step()
    assert wrapped_optimizer.param_groups[0]["lr"] == 0.05
    LambdaLR(wrapped_optimizer, lambda step: 0.1)  # a scheduler made after boost()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(RuntimeError, match=r"cannot be added after boost\(\)"):
        wrapped_optimizer.add_param_group({"params": []})


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_lr_scheduler_survives_a_file(tmp_path: Path) -> None:
    booster = Booster(SingleProcessPlugin())
    _, _, scheduler, _ = _objects()
    for _ in range(3):
        scheduler.step()
    booster.save_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    _, _, other, _ = _objects()
    booster.load_lr_scheduler(other, tmp_path / "scheduler.json")
    other.step(), scheduler.step()
    assert other.get_last_lr() == scheduler.get_last_lr() == [0.1 * 0.5**4]
    with pytest.raises(ConfigurationError, match="does not exist; give a file that save_lr_scheduler wrote"):
        booster.load_lr_scheduler(other, tmp_path / "nothing.json")


class _Warming(LRScheduler):
    """A class of the user's, which has more attributes later."""

    def get_lr(self) -> list[float]:
        if self.last_epoch:
            self.warmed = {self.last_epoch: (0.5,)}
        return [0.5 * each for each in self.base_lrs]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_the_state_of_another_scheduler_is_refused() -> None:
    """Torch would take it. A class of the user's decides itself about what it got later."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    step, cosine = StepLR(optimizer, 2), CosineAnnealingLR(optimizer, 5)
    others = [cosine, ExponentialLR(optimizer, 0.5), ReduceLROnPlateau(optimizer)]
    for given, state in [*((each, step.state_dict()) for each in others), (step, {}), (step, {"other": 1})]:
        before = copy.deepcopy(given.state_dict())
        with pytest.raises(ConfigurationError, match="is that of another lr_scheduler than this"):
            take_state(given, state, "lr_scheduler")
        assert repr(given.state_dict()) == repr(before)
    with pytest.raises(ConfigurationError, match="than this CosineAnnealingLR"):
        state = SequentialLR(optimizer, [step, step], [1]).state_dict()
        take_state(SequentialLR(optimizer, [step, cosine], [1]), state, "lr_scheduler")
    warmed, fresh = _Warming(optimizer), _Warming(optimizer)
    warmed.step()
    take_state(fresh, warmed.state_dict(), "lr_scheduler")
    assert fresh.warmed == {1: (0.5,)}


def test_plugins_are_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that is installed beside ours: metadata and a module on the path."""
    metadata = tmp_path / "somebodys_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[booster.plugins]\nsomebodys = somebodys_module:TheirPlugin\n")
    (tmp_path / "somebodys_module.py").write_text(
        f"from {__name__} import SingleProcessPlugin\n\nclass TheirPlugin(SingleProcessPlugin):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "somebodys" in available_plugins()
    assert type(Booster("somebodys").plugin).__name__ == "TheirPlugin"
    assert load_plugin("somebodys", factor=3.0).factor == 3.0


def test_an_unknown_plugin_is_told_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"plugin='nothing' is not installed; use one of \["):
        Booster("nothing")
