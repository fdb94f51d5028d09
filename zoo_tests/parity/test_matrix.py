"""Every family with every optimisation that has a meaning for it, on tp 2 x pp 2.

With the matrices of layouts and heads this is what the support page is written from. What breaks here first: a family
whose modules an optimisation takes for another's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardformer.policies.registry import family_policies, policy_for
from zoo_tests.case import Case, Recipe
from zoo_tests.compare import check_case
from zoo_tests.zoo import FAMILIES, Family

_FAST_KERNELS = {"enable_flash_attention": True, "enable_jit_fused": True, "enable_fused_normalization": True}
_RECOMPUTATION = {"gradient_checkpointing": "full"}
_ALL_TO_ALL = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
# transformers recomputes nothing of ALBERT, and whole stages of SwinV2, which pipeline stages cut.
_WITHOUT_RECOMPUTATION = ("albert", "swinv2")
# Their native norms round to fp32, which the fused ones do not.
_ROUNDING = ("llama", "mistral", "qwen2", "qwen3", "chatglm2")


def _exchanges(family: str, members: Family) -> bool:
    """Whether ranks may exchange heads around the family's attention."""
    policy = family_policies().get(family)
    return policy is not None and members.sequence_parallel and policy.exchanges_heads and policy.splits_sequence


def _cases() -> list:
    cases = []
    for family, members in FAMILIES.items():
        fused_precision = "fp32" if family in _ROUNDING else members.precision
        chosen: list[tuple[dict[str, Any], str]] = [
            (_FAST_KERNELS, fused_precision),
            (_RECOMPUTATION, members.precision),
        ]
        chosen = [each for each in chosen if each[0] is not _RECOMPUTATION or family not in _WITHOUT_RECOMPUTATION]
        if _exchanges(family, members):
            chosen.append((_ALL_TO_ALL, members.precision))
        for options, precision in chosen:
            recipe = Recipe(family=family, head=members.main_head, precision=precision)
            cases.append(Case(recipe=recipe, layout="tp2pp2", options=tuple(options.items())))
    return [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", _cases())
def test_optimisation_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_every_policy_of_a_family_is_in_the_zoo() -> None:
    """A policy that no test trains is none."""
    trained = {type(policy_for(members.build(members.main_head))) for members in FAMILIES.values()}
    assert set(family_policies().values()) <= trained
