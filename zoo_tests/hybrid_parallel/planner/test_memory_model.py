"""The bytes that the planner says a rank keeps are those that it keeps, in every layout, to the last one.

What breaks here first: something in the buckets or the optimizers that asks for values. Look in
`zoo_tests/harness/measured_memory.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugins.hybrid_parallel import HybridParallelConfig
from plugins.hybrid_parallel.planner.rank_memory import StaticMemory
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.measured_memory import memory_of, static_memory
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost

HEADS = {"bert": "masked_lm", "gpt2": "lm_head", "llama": "causal_lm"}
LAYOUTS = ("tp2", "pp2", "dp2", "tp2pp2", "tp2dp2", "pp2dp2")
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def _measured(case: Case) -> StaticMemory:
    boosted = boost(case)
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    boosted.optimizer.step()
    return memory_of(boosted.model)


def _check(family: str, layout: str, zero_stage: int = 1, optimizer: str = "adamw", **options: Any) -> None:
    precision = options.get("precision", "fp64")
    recipe = Recipe(family=family, head=HEADS[family], optimizer=optimizer, precision=precision)
    case = Case(recipe=recipe, layout=layout, zero_stage=zero_stage, options=tuple(options.items()))
    world_size = case.sizes.world_size
    measured = run_on_ranks(world_size, _measured, case)
    config = HybridParallelConfig.from_options(**{**case.plugin_options, "dp_size": None})

    def groups(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        return OPTIMIZERS[optimizer]([{"params": matrices}, {"params": vectors}], lr=0.1)

    predicted = [static_memory(recipe.model, config, world_size, rank, groups) for rank in range(world_size)]
    assert predicted == measured
    assert all(each.parameters and each.gradients and (each.states or optimizer == "sgd") for each in measured)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, layout) == ("gpt2", "tp2pp2") else pytest.mark.slow)
        for family in HEADS
        for layout in LAYOUTS
    ],
)
def test_bytes_are_exact(family: str, layout: str) -> None:
    _check(family, layout)


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("llama", "pp2dp2", {"precision": "bf16", "pp_style": "zbv", "num_microbatches": 4}),
        pytest.param("bert", "tp2dp2", {"precision": "fp16", "zero_stage": 0}, marks=pytest.mark.slow),
        pytest.param(
            "gpt2", "dp4", {"optimizer": "sgd", "precision": "bf16", "master_weights": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_bytes_are_exact_with_options(family: str, layout: str, options: dict[str, Any]) -> None:
    _check(family, layout, **options)
