"""All-to-all sequence parallelism trains like plain training: whole weights, cut sequences, exchanged heads.

What breaks here first: positions that a layer takes for those of its slice, padding that reaches the kernel, gradients
of whole weights that are not summed over the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.zoo import FAMILIES

_MODE = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}


def _case(family: str, layout: str, config: dict[str, Any] | None = None, **options: Any) -> Case:
    members = FAMILIES[family]
    recipe = Recipe(
        family=family,
        head=members.main_head,
        precision=members.precision,
        config=tuple((config or {}).items()),
        max_norm=0.05,
        optimizer="momentum",
    )
    return Case(recipe=recipe, layout=layout, options=tuple({**_MODE, **options}.items()))


FAST = [_case("bert", "tp2"), _case("llama", "tp2pp2"), _case("gpt2", "tp2dp2")]
SLOW = [
    _case("llama", "tp4", {"num_key_value_heads": 1}),
    _case("llama", "tp2", gradient_checkpointing="full"),
    _case("bert", "tp4", gradient_checkpointing="full"),
    _case("gpt2", "tp2pp2"),
    _case("qwen3", "tp2"),
    _case("mistral", "tp2pp2"),
    _case("vit", "tp2pp2"),
    _case("distilbert", "tp4"),
    _case("electra", "tp2"),
    _case("chatglm2", "tp2"),
    _case("bert", "tp2", {"attn_implementation": "eager"}),
    _case("gemma3", "tp2pp2"),  # by its own plan
]


def _parameters() -> list:
    fast = [pytest.param(case, id=str(case)) for case in FAST]
    return fast + [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("case", _parameters())
def test_all_to_all_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
