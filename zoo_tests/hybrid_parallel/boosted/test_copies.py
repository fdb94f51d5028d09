"""Copies of a boosted model have weights of their own: averages of weights (EMA) are those of plain torch.

What breaks here first: a forward that is bound to the modules of the original. Look in
`plugins/hybrid_parallel/boosted/model.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import loss_of

_RECIPE = Recipe(family="llama", head="causal_lm", config=(("num_hidden_layers", 2),))
_TWO_SEQUENCES = Recipe(family="bart", head="generation")
_OPTIONS = {
    "tp2": {"tp_size": 2},
    "fused": {"tp_size": 2, "enable_jit_fused": True, "enable_fused_normalization": True},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "dp2": {"dp_size": 2, "overlap_allgather": True},
    "cp2": {"cp_size": 2},
    "cp2-all_to_all": {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "sp2": {"tp_size": 2, "enable_sequence_parallelism": True},
    "sp2-all_to_all": {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
}


def _losses(model: nn.Module, step: Callable[[int], None], evaluate: Callable[[nn.Module], float]) -> list[float]:
    """Of the average after each step, and of the model at the end."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.4))
    losses = []
    for number in range(3):
        step(number)
        average.update_parameters(model)
        losses.append(evaluate(average.module))
    return [*losses, evaluate(model)]


def _plain(recipe: Recipe) -> list[float]:
    model = recipe.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(number: int) -> None:
        loss_of(model, recipe.zoo_head, recipe.batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _losses(model, step, lambda each: loss_of(each, recipe.zoo_head, recipe.batch(7)).item())


def _boosted(recipe: Recipe, layout: str) -> list[float]:
    booster = Booster(plugin=HybridParallelPlugin(**_OPTIONS[layout]))
    model = recipe.model()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))

    def step(number: int) -> None:
        booster.execute_pipeline(iter([recipe.batch(number)]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return _losses(
        model, step, lambda each: booster.execute_pipeline(iter([recipe.batch(7)]), each).loss.item()
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *(pytest.param(_RECIPE, layout, id=layout) for layout in _OPTIONS),
        *(pytest.param(_TWO_SEQUENCES, f"{axis}2-all_to_all", id=f"{axis}2, two sequences") for axis in ("sp", "cp")),
    ],
)
def test_averages_of_weights_are_those_of_plain_torch(recipe: Recipe, layout: str) -> None:
    # The fused norm stays in fp64 where transformers' goes through fp32.
    expected: Any = pytest.approx(_plain(recipe), rel=1e-5 if layout == "fused" else 1e-9)
    assert all(losses == expected for losses in run_on_ranks(2, _boosted, recipe, layout))


@distributed(2)
def test_a_copy_has_its_own_weights_and_no_optimizer() -> None:
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2))
    model = _RECIPE.model()
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    model.unwrap().model.norm.eval()
    other = copy.deepcopy(model)
    assert not other.unwrap().model.norm.training and other.unwrap().model.layers[0].training
    batch = _RECIPE.batch(0)
    before = model(**batch).loss.item()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert model(**batch).loss.item() == before != other(**batch).loss.item()
    with pytest.raises(ConfigurationError, match="without its optimizer"):
        other(**batch).loss.backward()
