"""Every row of `docs/porting.md` against the plain script, in which nothing of this library is used.

What fails here first is a row that says "the same" of a line that has become another one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.docs.pages import REPOSITORY, rows_of
from zoo_tests.harness.case import LAYOUTS, Recipe
from zoo_tests.harness.ranks import run_on_ranks

RECIPE = Recipe(family="llama", head="causal_lm", precision="fp32", rows=4)
Numbers = dict[str, list[float]]
_NORM, _DECAY = 0.3, 0.1


class Script:
    """The lines that plain and boosted scripts have in common."""

    def __init__(self) -> None:
        self.model: Any = RECIPE.model()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        batches = [RECIPE.batch(step) for step in range(4)]
        self.samples = [{name: value[row] for name, value in each.items()} for each in batches for row in range(4)]


class Plain(Script):
    """torch and transformers alone."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.batches: Any = DataLoader(self.samples, 4)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        loss.backward()

    def clip(self) -> float:
        return nn.utils.clip_grad_norm_(self.model.parameters(), _NORM).item()

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def checkpoint(self, folder: Path) -> None:
        folder.mkdir()
        torch.save([each.state_dict() for each in (self.model, self.optimizer, self.lr_scheduler)], folder / "all.pt")

    def resume(self, folder: Path) -> None:
        states = torch.load(folder / "all.pt", weights_only=True)
        for each, state in zip((self.model, self.optimizer, self.lr_scheduler), states, strict=True):
            each.load_state_dict(state)


class Boosted(Script):
    """The same with the lines of the table."""

    def __init__(self, layout: str, **options: Any) -> None:
        super().__init__()
        sizes = LAYOUTS[layout]
        self.booster = Booster(HybridParallelPlugin(tp_size=sizes.tp_size, **options))
        loader = DataLoader(self.samples, 4 // sizes.dp_size)
        self.model, self.optimizer, self.lr_scheduler, self.batches = self.booster.boost(
            self.model, self.optimizer, self.lr_scheduler, loader
        )

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        with nullcontext() if is_last else self.booster.no_sync(self.model, self.optimizer):
            self.booster.backward(loss, self.optimizer)

    def clip(self) -> float:
        return self.model.clip_grad_norm_(_NORM).item()

    def save(self, folder: Path) -> None:
        self.booster.save_model(self.model, folder)

    def checkpoint(self, folder: Path) -> None:
        self.booster.save_checkpoint(folder, model=self.model, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler)

    def resume(self, folder: Path) -> None:
        self.booster.load_checkpoint(folder, model=self.model, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler)


Make = Callable[..., Any]


def _finish(script: Any) -> None:
    script.optimizer.step()
    script.lr_scheduler.step()
    script.optimizer.zero_grad()


def _train(script: Any, steps: int = 4) -> list[float]:
    """backward, loss, zero_grad, lr scheduler, sampler: the losses of a loop."""
    losses = []
    for _, batch in zip(range(steps), script.batches, strict=False):
        loss = script.loss(batch)
        script.backward(loss)
        losses.append(loss.item())
        _finish(script)
    return losses


def _clip(make: Make, folder: Path) -> list[float]:
    script, norms = make(), []
    for batch in script.batches:
        script.backward(script.loss(batch))
        norms.append(script.clip())
        script.optimizer.step()
        script.model.zero_grad()
    return norms


def _accumulate(make: Make, folder: Path) -> list[float]:
    script, losses = make(), []
    for index, batch in enumerate(script.batches):
        loss = script.loss(batch)
        script.backward(loss / 2, is_last=index % 2 == 1)
        losses.append(loss.item())
        if index % 2:
            _finish(script)
    return [*losses, script.loss(batch).item()]


def _autocast(make: Make, folder: Path) -> list[float]:
    script, losses = make(), []
    for batch in script.batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = script.loss(batch)
        script.backward(loss)
        losses.append(loss.item())
        _finish(script)
    return losses


def _scale(make: Make, folder: Path) -> list[float]:
    if make is not Plain:
        return _train(make(precision="fp16"))
    script, losses, scaler = make(), [], torch.amp.GradScaler("cpu")
    for batch in script.batches:
        with torch.autocast("cpu", torch.float16):
            loss = script.loss(batch)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.step(script.optimizer), scaler.update(), script.lr_scheduler.step(), script.optimizer.zero_grad()
    return losses


def _evaluate(make: Make, folder: Path) -> list[float]:
    script = make()
    script.model.eval()
    with torch.no_grad():
        losses = [script.loss(batch).item() for batch in script.batches]
        if make is Plain:
            return losses + losses
        booster = script.booster
        return losses + [booster.execute_pipeline(iter([batch]), script.model).loss.item() for batch in script.batches]


def _average(make: Make, folder: Path) -> list[float]:
    script = make()
    ema = [param.detach().clone() for param in script.model.parameters()]
    for batch in script.batches:
        script.backward(script.loss(batch))
        _finish(script)
        torch._foreach_lerp_(ema, [param.detach() for param in script.model.parameters()], _DECAY)
    with torch.no_grad():
        for param, value in zip(script.model.parameters(), ema, strict=True):
            param.copy_(value)
    script.save(folder / "ema")
    return _opened(folder / "ema")


def _save(make: Make, folder: Path) -> list[float]:
    script = make()
    _train(script, steps=2)
    script.save(folder / "model")
    return _opened(folder / "model")


def _opened(folder: Path) -> list[float]:
    """The loss of what plain `from_pretrained` finds."""
    return [type(RECIPE.model()).from_pretrained(folder)(**RECIPE.batch(0)).loss.item()]


def _resume(make: Make, folder: Path) -> list[float]:
    script = make()
    _train(script, steps=2)
    script.checkpoint(folder / "checkpoint")
    script = make()
    script.resume(folder / "checkpoint")
    return [*_train(script, steps=2), script.lr_scheduler.get_last_lr()[0]]


# Row -> what runs it, and the largest relative difference: 16-bit numbers are rounded at other places.
_ROWS: dict[str, tuple[Callable[[Make, Path], list[float]], float]] = {
    **dict.fromkeys(
        ("wrap", "backward", "loss", "zero_grad", "lr scheduler", "sampler"), (lambda make, _: _train(make()), 1e-5)
    ),
    "clip": (_clip, 1e-4),
    "accumulation": (_accumulate, 1e-5),
    "autocast": (_autocast, 2e-3),
    "scaler": (_scale, 2e-3),
    "evaluation": (_evaluate, 1e-5),
    "EMA": (_average, 1e-5),
    "save": (_save, 1e-5),
    "resume": (_resume, 1e-5),
}


def _all_rows(make: Make, folder: str) -> Numbers:
    found = {run: run(make, Path(folder)) for run, _ in dict.fromkeys(_ROWS.values())}
    return {row: found[run] for row, (run, _) in _ROWS.items()}


def _boosted_rows(layout: str, folder: str) -> Numbers:
    return _all_rows(lambda **options: Boosted(layout, **options), folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Of the plain scripts."""
    return _all_rows(Plain, str(tmp_path_factory.mktemp("plain")))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_rows_have_the_numbers_of_the_plain_script(layout: str, plain: Numbers, tmp_path: Path) -> None:
    for numbers in run_on_ranks(2, _boosted_rows, layout, str(tmp_path)):
        for row, (_, tolerance) in _ROWS.items():
            assert numbers[row] == pytest.approx(plain[row], rel=tolerance), row


def test_every_row_is_run() -> None:
    assert {row for row, *_ in rows_of(REPOSITORY / "docs" / "porting.md", "Row")} == set(_ROWS)
