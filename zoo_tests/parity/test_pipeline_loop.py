"""The ordinary loop under a pipeline trains to the numbers of plain torch.

What breaks here first: a gradient at the border between the user's loss and the stages. Look in
`plugins/hybrid_parallel/boosted/user_loop.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from booster.errors import ConfigurationError
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.train_sharded import boost

_FAST = (
    Case(recipe=Recipe(family="gpt2", head="lm_head", optimizer="momentum", max_norm=0.1), layout="tp2pp2"),
    Case(recipe=Recipe(family="bert", head="sequence", optimizer="momentum"), layout="pp2dp2"),
    Case(
        recipe=Recipe(family="t5", head="generation"),
        layout="pp2",
        options=(("pp_style", "interleaved"), ("num_model_chunks", 2)),
    ),
)
_SLOW = (
    Case(recipe=Recipe(family="bert", head="masked_lm", precision="fp32"), layout="pp2"),
    Case(recipe=Recipe(family="llama", head="causal_lm", precision="fp16"), layout="tp2pp2"),
    Case(recipe=Recipe(family="llama", head="causal_lm", max_norm=0.1), layout="pp4"),
    Case(recipe=Recipe(family="llama", head="causal_lm"), layout="pp2", options=(("pp_style", "zbv"),)),
    Case(recipe=Recipe(family="bert", head="masked_lm"), layout="pp2dp2", zero_stage=0),
    Case(recipe=Recipe(family="llama", head="causal_lm"), layout="cp2pp2"),
    Case(recipe=Recipe(family="gpt2", head="lm_head"), layout="pp2", options=(("gradient_checkpointing", "full"),)),
)


def _params() -> list:
    cases = [*((case, []) for case in _FAST), *((case, pytest.mark.slow) for case in _SLOW)]
    return [pytest.param(case.but(ordinary_loop=True), id=str(case), marks=marks) for case, marks in cases]


@pytest.mark.parametrize("case", _params())
def test_ordinary_loop_of_a_pipeline(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@distributed(2)
def test_misuse_is_refused_on_all_ranks() -> None:
    recipe = Recipe(family="bert", head="sequence")
    boosted = boost(Case(recipe=recipe, layout="pp2", ordinary_loop=True))
    model, optimizer, backward = boosted.model, boosted.optimizer, boosted.booster.backward
    batch = boosted.share(recipe.batch(0))

    with pytest.raises(ConfigurationError, match=r"call booster\.backward\(loss, optimizer\)"):
        model(**batch).loss.backward()
    loss = model(**batch).loss
    with pytest.raises(RuntimeError, match="a second time"):
        backward(loss, optimizer)
        backward(loss * 2, optimizer)
    outputs = model(**batch)
    backward(model(**batch).loss, optimizer)
    optimizer.step()
    assert outputs.logits.shape[0] == len(batch["labels"])  # of the weights before the step, as in plain torch
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        backward(outputs.loss, optimizer)
    with torch.no_grad():
        assert not model(**batch).logits.requires_grad

    outputs = model(**batch)
    with pytest.raises(ConfigurationError, match=r"stage 0 reads outputs\.logits .* while stage 1 calls booster"):
        if boosted.plugin.stage_index == 0:
            outputs.logits  # noqa: B018
        backward(outputs.loss, optimizer)
