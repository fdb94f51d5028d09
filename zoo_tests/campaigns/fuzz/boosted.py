"""Plays a script by this library, on every rank."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.campaigns.fuzz.case import Action, Case
from zoo_tests.campaigns.fuzz.script import Criterion, Freezes, Player, Records, Side, quietly
from zoo_tests.campaigns.fuzz.setup import (
    build_model,
    build_optimizer,
    build_scheduler,
    fingerprint,
    first_row,
    freeze,
    head_of,
)
from zoo_tests.harness.case import LOSS_SCALE, share_of
from zoo_tests.zoo import Batch


class Boosted(Side):
    """The objects of `boost`.

    Args:
        case: what is built.
        directory: for checkpoints.
    """

    def __init__(self, case: Case, directory: Path) -> None:
        self.case, self.directory, self.head = case, directory, head_of(case)
        self.options: dict[str, Any] = dict(case.plugin)
        self._boost(build_model(case))

    def _boost(self, model: nn.Module) -> None:
        precision = "fp32" if self.case.precision == "fp64" else self.case.precision
        defaults = {"precision": precision, "initial_scale": LOSS_SCALE, "seed": 7}
        self.plugin = HybridParallelPlugin(**{**defaults, **self.options})
        self.booster = Booster(plugin=self.plugin)
        optimizer = build_optimizer(self.case, model)
        scheduler = build_scheduler(self.case, optimizer)
        self.model, self.optimizer, self.scheduler = self.booster.boost(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, criterion=self.head.criterion
        )[:3]

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model]

    def whole_parameters(self) -> AbstractContextManager[None]:
        return self.model.summon_full_params()

    def backward(self, batch: Batch, way: str, parts: int, is_last: bool) -> float:
        share = self._share(batch)
        if way == "pipeline":
            return self._execute(share, optimizer=self.optimizer).loss.item()
        with nullcontext() if is_last else self.booster.no_sync(self.model, self.optimizer):
            loss = self.model(**share).loss
            self.booster.backward(loss / parts, self.optimizer)
        return loss.item()

    def step(self) -> float | None:
        self.optimizer.step()
        return self.optimizer.grad_norm

    def evaluate(self, batch: Batch, way: str) -> tuple[float, Tensor]:
        share = self._share(batch)
        if way == "pipeline":
            result = self._execute(share, return_outputs=True)
        else:
            with torch.no_grad():
                result = outputs = self.model(**share)
        outputs = result.outputs if way == "pipeline" else result
        first = first_row(batch, self.plugin.dp_rank, self.plugin.dp_size)
        printed = torch.zeros(2, dtype=torch.float64) if outputs is None else fingerprint(outputs, share, first)
        dist.all_reduce(printed, group=self.plugin.mesh["dp"].get_group())
        return result.loss.item(), printed

    def forward(self, batch: Batch, way: str) -> float:
        share = self._share(batch)
        return (self._execute(share) if way == "pipeline" else self.model(**share)).loss.item()

    def generate(self, prompt: Batch, **options: Any) -> list[int]:
        return self.model.generate(**prompt, **options).flatten().tolist()

    def reload(self, action: Action, freezes: Freezes) -> None:
        state = self._state()
        target = self.directory / "checkpoint"
        handle = self.booster.save_checkpoint(target, **state, asynchronous=action.get("asynchronous", False), note="x")
        handle.wait()
        self.options = dict(action["plugin"])
        model = build_model(self.case)
        for part, frozen in freezes:
            freeze(model, [part], frozen)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.25)  # what is not loaded shows
        self._boost(model)
        extras = self.booster.load_checkpoint(target, **self._state())
        assert extras == {"note": "x"}, extras
        self._remove(target)

    def files(self) -> None:
        booster, folder = self.booster, self.directory / "files"
        booster.save_model(self.model, folder / "model")
        booster.save_optimizer(self.optimizer, folder / "optimizer")
        if self.scheduler is not None:
            booster.save_lr_scheduler(self.scheduler, folder / "scheduler.json")
            dist.barrier()
            booster.load_lr_scheduler(self.scheduler, folder / "scheduler.json")
        booster.load_model(self.model, folder / "model")
        booster.load_optimizer(self.optimizer, folder / "optimizer")
        self._remove(folder)

    def fail(self, batch: Batch) -> bool:
        def criterion(outputs: Any, share: Any) -> Tensor:
            raise Criterion("on purpose")

        try:
            self._execute(self._share(batch), criterion=criterion, optimizer=self.optimizer)
        except Criterion:
            return True
        return False

    def _execute(self, share: Batch, **options: Any) -> Any:
        return self.booster.execute_pipeline(iter([share]), self.model, **options)

    def _share(self, batch: Batch) -> Batch:
        return share_of(batch, self.plugin.dp_rank, self.plugin.dp_size)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def _remove(self, folder: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


def play_boosted(text: str, directory: Path) -> tuple[str, Records | str]:
    """Play the case of a JSON text; leaves the model in `directory`.

    Returns:
        ("played", the records) or ("refused", the sentence).
    """
    case = Case.from_json(text)
    try:
        with quietly():
            side = Boosted(case, directory)
            records = Player(case, side).play()
            side.booster.save_model(side.model, directory / "model")
    except ConfigurationError as error:
        return "refused", str(error)
    return "played", records
