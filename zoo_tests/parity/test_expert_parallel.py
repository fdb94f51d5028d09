"""Expert parallelism trains like plain transformers: each rank has some of the experts, and tokens travel to them.

What breaks here first: gradients of experts that are counted as often as there are ranks, tensor-parallel ranks that
send the same tokens, a rank that no token came to and that others wait for in the backward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zoo_tests.case import Case, Recipe
from zoo_tests.compare import check_case
from zoo_tests.zoo import FAMILIES


def _case(
    family: str,
    layout: str,
    ep_size: int,
    config: dict[str, Any] | None = None,
    optimizer: str = "momentum",
    precision: str = "fp32",
    **options: Any,
) -> Case:
    fields = {
        name: options.pop(name) for name in ("zero_stage", "ordinary_loop", "sequence_parallel") if name in options
    }
    recipe = Recipe(
        family=family,
        head=FAMILIES[family].main_head,
        precision=precision,
        config=tuple((config or {}).items()),
        max_norm=0.05,
        optimizer=optimizer,
    )
    return Case(recipe=recipe, layout=layout, options=tuple({"ep_size": ep_size, **options}.items()), **fields)


FAST = [
    _case("mixtral", "dp2", 2),
    _case("qwen3_moe", "dp4", 2, zero_stage=0),
    _case("mixtral", "tp2dp2", 2),
    _case("qwen3_moe", "pp2dp2", 2),
]
SLOW: list[Case] = []


def _parameters() -> list:
    fast = [pytest.param(case, id=str(case)) for case in FAST]
    return fast + [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("case", _parameters())
def test_experts_on_several_ranks_train_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
