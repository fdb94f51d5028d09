"""Every head class of every family, in tensor and pipeline parallelism: fp64, SGD, against plain training.

The main head of each family is in `test_parity.py`.

What breaks here first: the sums and counts of a head's loss, a module of a head that no stage has, and heads of new
releases of transformers. A head that fails alone points at `shardformer/losses` or at the family's policy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.parity.test_parity import ENGINE_FAMILIES, TWO_MICROBATCHES
from zoo_tests.zoo import FAMILIES


def _heads() -> list:
    cases = [
        Case(
            recipe=Recipe(family=family, head=name, precision=members.precision, steps=1),
            layout=head.layout or layout,
            options=(("num_microbatches", 1),) if head.samples_are_coupled else tuple(TWO_MICROBATCHES.items()),
        )
        for family, members in FAMILIES.items()
        for name, head in members.heads.items()
        for layout in (("tp2pp2", "dp2") if family in ENGINE_FAMILIES else ("tp2pp2",))
        if name != members.main_head
    ]
    return [pytest.param(case, id=str(case)) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", _heads())
def test_head_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
