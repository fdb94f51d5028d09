"""Every family on its layouts trains to the numbers of plain training, in fp64 with SGD (Adam hides wrong scales).

The engine is proved on three shapes, on every layout. Of the other families only the table and what optimisations take
their modules for has to be: their few cases carry the optimisations along, so that each family meets each axis and
each optimisation once. With the heads this is what the support page is written from.

What breaks here first: anything in the layers, the stages, the reduction or the weighting of the loss. The message
names the tensors; one tensor that is wrong by itself points at its layer, all of them at the loss or the reduction. In
one family alone: its table, or modules that an optimisation takes for another's.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardformer.policies.registry import family_policies, policy_for
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.zoo import FAMILIES, Family

ENGINE_FAMILIES = ("bert", "llama", "gpt2")
# The fast part of the suite has each axis once and the layouts that combine two; the slow part has the rest.
FAST_LAYOUTS = ("tp2", "pp2", "dp2", "tp2pp2", "pp2dp2")
TWO_MICROBATCHES = {"num_microbatches": 2}

_FLASH = {"enable_flash_attention": True}
_FUSED_NORMS = {"enable_fused_normalization": True}
_FUSED_OPERATORS = {"enable_jit_fused": True}
_RECOMPUTATION = {"gradient_checkpointing": "full"}
_ALL_TO_ALL = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
# What a family cannot do, and why, is in `harness/support_reasons.py`.
_WITHOUT_RECOMPUTATION = ("cpmant",)
_WITHOUT_ULYSSES = ("qwen3_next",)  # on ranks that share layers too; ranks that share sequences alone have it
_WITHOUT_FUSED_NORMS = ("cpmant",)
_WITHOUT_FUSIONS = ("falcon", "falcon_multi_query", "mixtral", "qwen3_moe", "cpmant")
# Members of the zoo that are other configurations, or other models, of a family with a policy.
_VARIANTS = {
    **dict.fromkeys(("clip_text", "clip_vision", "clip_towers"), "clip"),
    **dict.fromkeys(("falcon_alibi", "falcon_multi_query"), "falcon"),
    "blip_2_t5": "blip_2",
    "deberta_v2_convolved": "deberta_v2",
    "opt_projected": "opt",
}
# Their native norms round to fp32, which the fused ones do not.
_ROUNDING = (
    *("llama", "mistral", "qwen2", "qwen3", "chatglm2", "gemma2", "gemma3", "glm", "glm4", "olmo2", "phi3"),
    *("mixtral", "qwen3_moe", "blip_2_t5"),
)


def _engine_cases(family: str, members: Family) -> Iterator[Case]:
    """All layouts x ZeRO 0 and 1 x sequence parallelism where there is a tensor-parallel axis.

    Layouts that no fast test has are shared out among the three families: what they combine has been proved in each.
    """
    recipe = Recipe(family=family, head=members.main_head, precision=members.precision)
    turn = ENGINE_FAMILIES.index(family)
    for number, (layout, sizes) in enumerate(LAYOUTS.items()):
        if layout not in ("single", *FAST_LAYOUTS) and number % 3 == turn:
            continue
        # Without replicas nothing is shared out, and ZeRO-1 is ZeRO-0; with them, ZeRO-0 has a family for each layout.
        has_zero_0 = sizes.dp_size * sizes.cp_size > 1 and (number + 1) % 3 == turn
        for zero_stage in (0, 1) if has_zero_0 else (1,):
            for sequence_parallel in (False, True) if sizes.tp_size > 1 else (False,):
                yield Case(recipe=recipe, layout=layout, zero_stage=zero_stage, sequence_parallel=sequence_parallel)
    yield _case(family, members, "tp2pp2", _kernels(family, members))
    yield _case(family, members, "tp2pp2", _RECOMPUTATION)
    yield _case(family, members, "tp2pp2", _ALL_TO_ALL)


def _table_cases(family: str, members: Family) -> Iterator[Case]:
    """What a table can get wrong: what is cut, how unevenly, and what lies before, between and behind the stages.

    Four ranks cut a table wherever two do. A policy that only renames another's table has been proved by that one.
    """
    options = _options_of_four(family, members)
    together = dict(TWO_MICROBATCHES)
    for layout in _layouts_of_four(family):
        yield _case(family, members, layout, options.pop(layout))
    for others in options.values():
        together |= others
    yield _case(family, members, "tp2pp2", together, sequence_parallel=members.sequence_parallel)
    if _supports_ulysses(family, members):
        yield _case(family, members, "tp2", _ALL_TO_ALL)


def _layouts_of_four(family: str) -> tuple[str, ...]:
    """Families take turns with four parts of one axis; what rides along there rides along on both axes otherwise."""
    if _only_renames(family):
        return ()
    turn = zlib.crc32(family.encode()) % 2  # stays when another family is added
    return (("pp4", "tp4")[turn],)


def _options_of_four(family: str, members: Family) -> dict[str, dict[str, Any]]:
    recomputation = {} if family in _WITHOUT_RECOMPUTATION else _RECOMPUTATION
    return {"tp4": _kernels(family, members), "pp4": recomputation}


def _campaign_cases() -> list[Case]:
    """The layout of four ranks on which a family has no turn."""
    return [
        _case(family, members, layout, options)
        for family, members in FAMILIES.items()
        if family not in ENGINE_FAMILIES and not _only_renames(family)
        for layout, options in _options_of_four(family, members).items()
        if layout not in _layouts_of_four(family)
    ]


def _case(family: str, members: Family, layout: str, options: dict[str, Any], sequence_parallel: bool = False) -> Case:
    rounds = family in _ROUNDING and "enable_fused_normalization" in options
    precision = "fp32" if rounds else members.precision
    # A second step meets other weights, which the engine's shapes prove.
    recipe = Recipe(family=family, head=members.main_head, precision=precision, steps=1 + (family in ENGINE_FAMILIES))
    return Case(recipe=recipe, layout=layout, sequence_parallel=sequence_parallel, options=tuple(options.items()))


def _only_renames(family: str) -> bool:
    policy = family_policies().get(family)
    return policy is not None and not {"module_policy", "table", "stages"} & set(vars(policy))


def _kernels(family: str, members: Family) -> dict[str, Any]:
    """The fused kernels that have a meaning for the family."""
    kernels = dict(_FLASH) if _attends_by_registry(family, members) else {}
    kernels |= {} if family in _WITHOUT_FUSED_NORMS else _FUSED_NORMS
    return kernels | ({} if family in _WITHOUT_FUSIONS else _FUSED_OPERATORS)


def _supports_ulysses(family: str, members: Family) -> bool:
    policy = _policy(family)
    exchanges = family not in _WITHOUT_ULYSSES and (policy is None or policy.supports_ulysses)
    return exchanges and members.sequence_parallel and _attends_by_registry(family, members)


def _policy(family: str) -> type | None:
    return family_policies().get(_VARIANTS.get(family, family))


def _attends_by_registry(family: str, members: Family) -> bool:
    policy = _policy(family)
    if policy is not None and policy.own_attention:
        return True
    model_class = getattr(importlib.import_module(members.module), members.heads[members.main_head].model_class)
    return hasattr(importlib.import_module(model_class.__module__), "ALL_ATTENTION_FUNCTIONS")


def cases() -> list[Case]:
    """Those of all families."""
    return [
        case
        for family, members in FAMILIES.items()
        for case in (_engine_cases if family in ENGINE_FAMILIES else _table_cases)(family, members)
    ]


def _is_fast(case: Case) -> bool:
    is_engine = case.recipe.family in ENGINE_FAMILIES and not case.options
    return is_engine and case.layout in FAST_LAYOUTS and case.zero_stage == 1


def _parameters() -> list:
    suite = [pytest.param(case, id=str(case), marks=() if _is_fast(case) else pytest.mark.slow) for case in cases()]
    return suite + [pytest.param(case, id=str(case), marks=pytest.mark.campaign) for case in _campaign_cases()]


@pytest.mark.parametrize("case", _parameters())
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_every_policy_of_a_family_is_in_the_zoo() -> None:
    """A policy that no test trains is none."""
    trained = {type(policy_for(members.build(members.main_head))) for members in FAMILIES.values()}
    assert set(family_policies().values()) <= trained
