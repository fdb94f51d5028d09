"""Sharded training of a Case on every rank, and what it leaves for the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, share_of


@dataclass
class RankReport:
    """What one rank saw.

    Attributes:
        stage: its pipeline stage.
        losses: of every step.
        grad_norms: of every step, where gradients are clipped.
        checksums: name -> sum of absolute values of the full gradient after the first step.
    """

    stage: int
    losses: list[float]
    grad_norms: list[float]
    checksums: dict[str, float]


@dataclass
class Boosted:
    """The objects of a training loop."""

    plugin: HybridParallelPlugin
    booster: Booster
    model: Any
    optimizer: Any
    scheduler: Any

    def share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's share of a global batch."""
        return share_of(batch, self.plugin.dp_rank, self.plugin.dp_size)

    def pipeline_backward(self, share: dict[str, Tensor]) -> Tensor:
        """The loss of a global batch; its gradients are left for the optimizer."""
        return self.booster.execute_pipeline(iter([share]), self.model, optimizer=self.optimizer).loss

    def ordinary_backward(self, share: dict[str, Tensor]) -> Tensor:
        """The same without `execute_pipeline`."""
        loss = self.model(**share).loss
        self.booster.backward(loss, self.optimizer)
        return loss.detach()

    def finish_step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def boost(case: Case) -> Boosted:
    """Build and boost what the case trains."""
    plugin = HybridParallelPlugin(**case.plugin_options)
    booster = Booster(plugin=plugin)
    model = case.recipe.model()
    optimizer, scheduler = case.recipe.training(model)
    objects = [model, optimizer, scheduler]
    if case.recipe.zoo_head.criterion is not None:
        objects.append(case.recipe.zoo_head.criterion)
    model, optimizer, scheduler = booster.boost(*objects)[:3]
    return Boosted(plugin, booster, model, optimizer, scheduler)


def train_sharded(case: Case, directory: Path) -> RankReport:
    """Train on all ranks; gradients of each stage and the model at the end are left in `directory`."""
    boosted = boost(case)
    report = RankReport(boosted.plugin.stage_index, [], [], {})
    for step in range(case.recipe.steps):
        batch = boosted.share(case.recipe.batch(step))
        backward = boosted.ordinary_backward if case.ordinary_loop else boosted.pipeline_backward
        report.losses.append(backward(batch).item())
        if step == 0:
            report.checksums = _leave_gradients(boosted, directory)
        boosted.finish_step()
        if case.recipe.max_norm is not None:
            report.grad_norms.append(boosted.optimizer.grad_norm)
    boosted.booster.save_model(boosted.model, directory / "model")
    return report


def _leave_gradients(boosted: Boosted, directory: Path) -> dict[str, float]:
    gradients = boosted.optimizer.full_gradients()
    plugin = boosted.plugin
    if plugin.dp_rank == 0 and plugin.tp_rank == 0 and plugin.mesh.get_local_rank("cp") == 0:
        tensors = {name: gradient.contiguous() for name, gradient in gradients.items()}
        save_file(tensors, directory / f"gradients-{plugin.stage_index}.safetensors")
    return {name: torch.linalg.vector_norm(gradient.double(), 1).item() for name, gradient in gradients.items()}
