"""`booster.verify`: equal, or where a module of the user's own differs first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import ConfigurationError, VerificationError, verify
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ranks import distributed

RECIPE = Recipe(family="llama", head="causal_lm", rows=5)


class Regression(nn.Module):
    """Somebody's own module, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(found=self.out(self.drop(torch.tanh(self.hidden(x)))))


class Centred(Regression):
    """Looks at the whole batch, so that it is another model on a part of it."""

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return super().forward(x - x.mean(0), y)


def mean_square(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """A criterion."""
    return nn.functional.mse_loss(outputs.found, batch["y"])


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(5, 3, generator=generator), "y": torch.randn(5, 1, generator=generator)}


@pytest.mark.slow
@distributed(2)
def test_models_that_train_alike_and_one_that_does_not() -> None:
    report = verify(RECIPE.model, RECIPE.batch(0), HybridParallelPlugin(tp_size=2))
    assert report.equal and "tp 2, 2 ranks, fp64, 2 steps of 5 samples\nequal\n" in str(report)
    assert report.verdict.worst[1].count > 10, "gradients"
    plugin = HybridParallelPlugin(max_norm=0.01)  # plain training clips, too
    assert verify(Regression, _batch(), plugin, criterion=mean_square).equal
    with pytest.raises(VerificationError, match="Centred, data parallel, 2 ranks.*\n.*different: step 1"):
        verify(Centred, _batch(), plugin, criterion=mean_square)
    with pytest.raises(ConfigurationError, match="returns no loss for this batch; use .* or a criterion"):
        verify(Regression, _batch(), plugin)
    with pytest.raises(ConfigurationError, match="precision='bf16' cannot be compared in; use fp64 or fp32"):
        verify(Regression, _batch(), plugin, precision="bf16")


@pytest.mark.slow
def test_ranks_are_started_where_there_are_none() -> None:
    assert verify(Regression, _batch(), HybridParallelPlugin(dp_size=2), criterion=mean_square).equal
