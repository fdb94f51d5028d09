"""Every family with every optimisation that has a meaning for it, on tp 2 x pp 2.

With the matrices of layouts and heads this is what the support page is written from. What breaks here first: a family
whose modules an optimisation takes for another's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardformer.policies.registry import family_policies, policy_for
from zoo_tests.case import Case, Recipe
from zoo_tests.compare import check_case
from zoo_tests.zoo import FAMILIES, Family

_FLASH = {"enable_flash_attention": True}
_FUSED_NORMS = {"enable_fused_normalization": True}
_FUSED_OPERATORS = {"enable_jit_fused": True}
_RECOMPUTATION = {"gradient_checkpointing": "full"}
_ALL_TO_ALL = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
# transformers recomputes nothing of ALBERT and MPNet, and whole stages of SwinV2, which pipeline stages cut.
_WITHOUT_RECOMPUTATION = ("albert", "mpnet", "swinv2")
# Their native norms round to fp32, which the fused ones do not.
_ROUNDING = ("llama", "mistral", "qwen2", "qwen3", "chatglm2")
# Whose tables name operators to fuse.
_WITH_FUSIONS = ("bert", "roberta", "ernie", "electra", "gpt2", "llama", "mistral", "qwen2", "qwen3")


def _attends_by_registry(members: Family) -> bool:
    model_class = getattr(importlib.import_module(members.module), members.heads[members.main_head].model_class)
    return hasattr(importlib.import_module(model_class.__module__), "ALL_ATTENTION_FUNCTIONS")


def _optimisations(family: str, members: Family) -> Iterator[tuple[dict[str, Any], str]]:
    """What has a meaning for the family, and the precision to compare it in."""
    policy = family_policies().get(family.removesuffix("_convolved"))
    kernels = dict(_FLASH) if _attends_by_registry(members) else {}
    kernels |= _FUSED_NORMS if policy is not None else {}  # a plan does not say which norms it has
    kernels |= _FUSED_OPERATORS if family in _WITH_FUSIONS else {}
    if kernels:
        yield kernels, "fp32" if family in _ROUNDING else members.precision
    if family not in _WITHOUT_RECOMPUTATION:
        yield _RECOMPUTATION, members.precision
    if policy is not None and members.sequence_parallel and policy.exchanges_heads and _attends_by_registry(members):
        yield _ALL_TO_ALL, members.precision


def _cases() -> list:
    cases = []
    for family, members in FAMILIES.items():
        for options, precision in _optimisations(family, members):
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
