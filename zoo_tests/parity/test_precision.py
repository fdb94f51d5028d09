"""fp32, bf16 and fp16, and curves of 20 steps.

The reference of a 16-bit run is plain training in the same precision: parameters cast, fp32 originals for the
optimizer, losses from fp32 logits. The same rounding falls differently when a sum is cut over ranks, so the limits
are those of the number format; a forgotten unscaling, or a sum in 16 bit, exceeds them by far.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost

HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head"}


def _cases(precision: str, optimizer: str, layouts: tuple[str, ...], turn: int, fast: tuple[str, ...] = ()) -> list:
    """Families take turns with the layouts, others in each precision; fp64 has proved all of both together."""
    cases = []
    for number, (family, head) in enumerate(HEADS.items()):
        for place, layout in enumerate(layouts):
            recipe = Recipe(family=family, head=head, precision=precision, optimizer=optimizer, steps=3)
            case = Case(recipe=recipe, layout=layout)
            mark = pytest.mark.slow if (number + place) % 3 == turn else pytest.mark.campaign
            cases.append(pytest.param(case, id=str(case), marks=[] if (family, layout) == fast else [mark]))
    return cases


@pytest.mark.parametrize("case", _cases("fp32", "adamw", ("tp4", "tp2pp2", "pp2dp2"), 0))
def test_fp32_with_adamw(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path, weights=False)


@pytest.mark.parametrize(
    "case",
    _cases("bf16", "momentum", ("tp2", "pp2dp2", "tp2pp2"), 0, fast=("gpt2", "pp2dp2"))
    + _cases("fp16", "momentum", ("tp2", "pp2dp2", "tp2pp2"), 2, fast=("bert", "tp2pp2")),
)
def test_16_bit(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("bert", "tp2pp2", marks=pytest.mark.campaign),
        pytest.param("llama", "pp2dp2", marks=pytest.mark.campaign),
        pytest.param("gpt2", "tp2dp2", marks=pytest.mark.slow),
    ],
)
def test_loss_curve_of_20_steps(family: str, layout: str, tmp_path: Path) -> None:
    recipe = Recipe(family=family, head=HEADS[family], optimizer="adamw", precision="fp32", steps=20)
    check_case(Case(recipe=recipe, layout=layout), tmp_path, weights=False)


# ----- overflow in fp16 -----


def _step_over_an_overflow(case: Case) -> None:
    """The gradient of one parameter overflows on the last rank alone; the next step is sound again."""
    boosted = boost(case)
    before = _weights(boosted)
    hook = None
    if dist.get_rank() == dist.get_world_size() - 1:
        param = next(param for param in boosted.model.unwrap().parameters() if param.requires_grad)
        hook = torch.Tensor.register_hook(param, lambda gradient: gradient * float("inf"))
    scale = boosted.optimizer.loss_scale.value
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    boosted.finish_step()
    assert boosted.optimizer.step_was_skipped
    assert boosted.optimizer.loss_scale.value == scale / 2
    assert all(torch.equal(value, before[name]) for name, value in _weights(boosted).items())
    if hook is not None:
        hook.remove()
    loss = boosted.pipeline_backward(boosted.share(case.recipe.batch(1)))
    boosted.finish_step()
    assert torch.isfinite(loss) and not boosted.optimizer.step_was_skipped
    assert any(not torch.equal(value, before[name]) for name, value in _weights(boosted).items())


def _weights(boosted: Boosted) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in boosted.model.unwrap().named_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("layout", ["tp2pp2", "pp2dp2"])
def test_overflow_on_one_rank_skips_the_step_on_all(layout: str, zero_stage: int) -> None:
    recipe = Recipe(family="bert", head="masked_lm", precision="fp16", optimizer="adamw")
    run_on_ranks(4, _step_over_an_overflow, Case(recipe=recipe, layout=layout, zero_stage=zero_stage))
