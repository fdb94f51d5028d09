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
TABLE_LAYOUTS = ("tp2", "tp4", "pp2", "pp4", "tp2pp2")
# A policy that only renames another's table has been proved by that one.
RENAMED_LAYOUTS = ("tp2", "pp2", "tp2pp2")


def _only_renames(family: str) -> bool:
    policy = family_policies().get(family)
    return policy is not None and not {"module_policy", "stages"} & set(vars(policy))


def _matrix() -> list:
    """Families x layouts x ZeRO 0 and 1 x sequence parallelism where there is a tensor-parallel axis."""
    cases = []
    for family, members in FAMILIES.items():
        is_engine = family in ENGINE_FAMILIES
        layouts = RENAMED_LAYOUTS if _only_renames(family) else TABLE_LAYOUTS
        for layout, sizes in LAYOUTS.items():
            if not is_engine and layout not in layouts:
                continue
            for zero_stage in (0, 1) if is_engine else (1,):
                for sequence_parallel in (False, True) if sizes.tp_size > 1 and members.sequence_parallel else (False,):
                    case = Case(
                        recipe=Recipe(family=family, head=members.main_head, precision=members.precision),
                        layout=layout,
                        zero_stage=zero_stage,
                        sequence_parallel=sequence_parallel,
                    )
                    fast = layout in FAST_LAYOUTS and zero_stage == 1 and is_engine
                    cases.append(pytest.param(case, id=str(case), marks=[] if fast else [pytest.mark.slow]))
    return cases


@pytest.mark.parametrize("case", _matrix())
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
