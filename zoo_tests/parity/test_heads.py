"""Every head class of every family, in tensor and pipeline parallelism: fp64, SGD, against plain training.

The main head of each family is in `test_parity.py`.

What breaks here first: the sums and counts of a head's loss, a module of a head that no stage has, and heads of new
releases of transformers. A head that fails alone points at `shardformer/loss` or at the family's policy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.parity.test_parity import ENGINE_FAMILIES, TWO_MICROBATCHES
from zoo_tests.zoo import FAMILIES, Head

# Tensor parallelism cuts neither classifiers nor a user's criterion, and the layers below are those of the main head:
# pipelines are left.
_CLASSIFIERS = (
    "bare",
    "sequence",
    "token",
    "question_answering",
    "multiple_choice",
    "next_sentence",
    "regression",
    "multi_label",
)


def _layouts(family: str, name: str, head: Head) -> tuple[str, ...]:
    if head.layout is not None:
        return (head.layout,)
    if family in ENGINE_FAMILIES:
        return ("tp2pp2", "dp2")
    return ("pp2",) if name in _CLASSIFIERS else ("tp2pp2",)


def _heads() -> list:
    cases = [
        Case(
            recipe=Recipe(family=family, head=name, precision=members.precision, steps=1),
            layout=layout,
            options=(("num_microbatches", 1),) if head.samples_are_coupled else tuple(TWO_MICROBATCHES.items()),
        )
        for family, members in FAMILIES.items()
        for name, head in members.heads.items()
        for layout in _layouts(family, name, head)
        if name != members.main_head
    ]
    return [pytest.param(case, id=str(case)) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", _heads())
def test_head_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
