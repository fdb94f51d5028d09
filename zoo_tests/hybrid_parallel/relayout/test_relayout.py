"""`booster.relayout` against a checkpoint that is saved and loaded at each change of the layout."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.hybrid_parallel.relayout.chain import INITIAL_SCALE, LAYOUTS, scales, train
from zoo_tests.hybrid_parallel.relayout.refusals import refused, use_what_has_moved


def _tour(names: list[str]) -> list[str]:
    """A walk that takes every ordered pair of names once."""
    left = {name: [other for other in names if other != name] for name in names}
    stack, found = [names[0]], []
    while stack:  # Hierholzer's algorithm
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            found.append(stack.pop())
    return found[::-1]


_LLAMA = Recipe(family="llama", head="causal_lm", optimizer="adamw", precision="fp32", rows=72)


@pytest.mark.parametrize(
    ("recipe", "layouts"),
    [
        pytest.param(replace(_LLAMA, rows=32), ["tp2pp2", "dp4 stage 3"], id="two layouts"),
        pytest.param(_LLAMA, list(LAYOUTS), id="llama", marks=pytest.mark.slow),
        pytest.param(replace(_LLAMA, adapters=("q_proj",)), list(LAYOUTS), id="llama-lora", marks=pytest.mark.slow),
        pytest.param(
            Recipe(family="gpt2", head="lm_head", optimizer="adamw", precision="bf16", rows=72),
            list(LAYOUTS),
            id="gpt2-bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_bits_of_a_save_and_a_load(recipe: Recipe, layouts: list[str], tmp_path: Path) -> None:
    runs = [run_on_ranks(4, train, recipe, layouts, {}, folder, timeout_s=300.0) for folder in (None, str(tmp_path))]
    for (losses, weights), (expected, saved) in zip(*runs, strict=True):
        assert losses == expected
        assert weights.keys() == saved.keys()
        assert all(torch.equal(weights[name], saved[name]) for name in saved)


def test_the_loss_scale_goes_on_behind_an_overflow() -> None:
    """The scale and the count of good steps move: the second of two good steps doubles it in the new layout."""
    for before, moved, later in run_on_ranks(4, scales, replace(_LLAMA, precision="fp16"), "tp2pp2", "dp4 stage 3"):
        assert before == moved and before["good_steps"] == 1
        assert before["value"] < INITIAL_SCALE, "no step has overflowed"
        assert later == {"value": 2 * before["value"], "good_steps": 0}


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_every_ordered_pair_of_layouts(family: str, tmp_path: Path) -> None:
    head = {"llama": "causal_lm", "bert": "masked_lm"}[family]
    recipe = replace(_LLAMA, family=family, head=head)
    tour = _tour(list(LAYOUTS))
    assert set(itertools.pairwise(tour)) == set(itertools.permutations(LAYOUTS, 2))
    runs = [run_on_ranks(4, train, recipe, tour, {}, folder, timeout_s=900.0) for folder in (None, str(tmp_path))]
    assert runs[0][0][0] == runs[1][0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("gradients", "are no part of a training state"),
        ("layout", "more than the model's"),
        ("loader", "cannot say where it is in its epoch"),
        ("optimizer", "got 0 of the 1 optimizers"),
        ("plugin", "give the plugin of the new layout first"),
        ("average", "does not move the average"),
    ],
)
def test_what_is_refused_leaves_the_job_as_it_was(mistake: str, sentence: str) -> None:
    for said, is_same in run_on_ranks(4, refused, mistake):
        assert sentence in said
        assert is_same


def test_what_has_moved_cannot_be_used() -> None:
    for said in run_on_ranks(4, use_what_has_moved):
        assert len(said) == 4
        assert all("has moved the state of this" in each for each in said)
