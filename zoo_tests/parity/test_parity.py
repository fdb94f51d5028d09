"""Every family on every layout trains to the numbers of plain training, in fp64 with SGD (Adam hides wrong scales).

What breaks here first: anything in the layers, the stages, the reduction or the weighting of the loss. The message
names the tensors; one tensor that is wrong by itself points at its layer, all of them at the loss or the reduction.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardformer.policies.registry import family_policies
from zoo_tests.case import LAYOUTS, Case, Recipe
from zoo_tests.compare import check_case
from zoo_tests.zoo import FAMILIES

# The engine is proved on three shapes; of the families that share one of them, only the table has to be.
ENGINE_FAMILIES = ("bert", "llama", "gpt2")
# The fast part of the suite has each axis once and the layouts that combine two; the slow part has the rest.
FAST_LAYOUTS = ("tp2", "pp2", "dp2", "tp2pp2", "pp2dp2")
# What a table can get wrong: what is cut, how unevenly, and what lies before, between and behind the stages.
# Four ranks cut a table wherever two do.
TABLE_LAYOUTS = ("tp4", "pp4", "tp2pp2")
# A policy that only renames another's table has been proved by that one.
RENAMED_LAYOUTS = ("tp2pp2",)


def _only_renames(family: str) -> bool:
    policy = family_policies().get(family)
    return policy is not None and not {"module_policy", "stages"} & set(vars(policy))


def matrix() -> list[Case]:
    """Families x layouts x ZeRO 0 and 1 x sequence parallelism where there is a tensor-parallel axis."""
    cases = []
    for family, members in FAMILIES.items():
        is_engine = family in ENGINE_FAMILIES
        layouts = RENAMED_LAYOUTS if _only_renames(family) else TABLE_LAYOUTS
        for layout, sizes in LAYOUTS.items():
            if not is_engine and layout not in layouts:
                continue
            # Without replicas nothing is shared out, and ZeRO-1 is ZeRO-0.
            for zero_stage in (0, 1) if is_engine and sizes.dp_size * sizes.cp_size > 1 else (1,):
                for sequence_parallel in (False, True) if sizes.tp_size > 1 and members.sequence_parallel else (False,):
                    case = Case(
                        recipe=Recipe(family=family, head=members.main_head, precision=members.precision),
                        layout=layout,
                        zero_stage=zero_stage,
                        sequence_parallel=sequence_parallel,
                    )
                    cases.append(case)
    return cases


def _is_fast(case: Case) -> bool:
    return case.layout in FAST_LAYOUTS and case.zero_stage == 1 and case.recipe.family in ENGINE_FAMILIES


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=() if _is_fast(case) else pytest.mark.slow) for case in matrix()],
)
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
