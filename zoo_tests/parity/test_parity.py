"""Every family on every layout trains to the numbers of plain training, in fp64 with SGD (Adam hides wrong scales).

What breaks here first: anything in the layers, the stages, the reduction or the weighting of the loss. The message
names the tensors; one tensor that is wrong by itself points at its layer, all of them at the loss or the reduction.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.case import LAYOUTS, Case, Recipe
from zoo_tests.compare import check_case

MAIN_HEADS = {
    "bert": "masked_lm",
    "llama": "causal_lm",
    "gpt2": "lm_head",
    "roberta": "masked_lm",
    "mistral": "causal_lm",
    "qwen2": "causal_lm",
    "qwen3": "causal_lm",
}
# The engine is proved on three shapes; of the families that share one of them, only the table has to be.
ENGINE_FAMILIES = ("bert", "llama", "gpt2")
# The fast part of the suite has each axis once and the layouts that combine two; the slow part has the rest.
FAST_LAYOUTS = ("tp2", "pp2", "dp2", "tp2pp2", "pp2dp2")


def _matrix() -> list:
    """Families x layouts x ZeRO 0 and 1 x sequence parallelism where there is a tensor-parallel axis."""
    cases = []
    for family, head in MAIN_HEADS.items():
        for layout, sizes in LAYOUTS.items():
            for zero_stage in (0, 1) if family in ENGINE_FAMILIES else (1,):
                for sequence_parallel in (False, True) if sizes.tp_size > 1 else (False,):
                    case = Case(
                        recipe=Recipe(family=family, head=head),
                        layout=layout,
                        zero_stage=zero_stage,
                        sequence_parallel=sequence_parallel,
                    )
                    fast = layout in FAST_LAYOUTS and zero_stage == 1 and family in ENGINE_FAMILIES
                    cases.append(pytest.param(case, id=str(case), marks=[] if fast else [pytest.mark.slow]))
    return cases


@pytest.mark.parametrize("case", _matrix())
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
