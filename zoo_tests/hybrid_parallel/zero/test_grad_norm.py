"""Norms of gradients of every type, in layouts that hold parameters in every way, against torch's of the whole model.

What breaks here first: a parameter that two ranks have is counted twice, or `nan` is lost between ranks. Look in
`plugins/hybrid_parallel/zero/reducer.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from booster.errors import ConfigurationError
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost

_BERT = Recipe(family="bert", head="masked_lm")
_REPRODUCIBLE = (("reproducible", True),)
CASES = {
    "tied": Case(recipe=_BERT, layout="pp2dp2", zero_stage=1),
    "gathered": Case(recipe=_BERT, layout="tp2dp2", zero_stage=3),
    "experts": Case(recipe=Recipe(family="mixtral", head="causal_lm"), layout="dp2", options=(("ep_size", 2),)),
    "reproducible": Case(recipe=_BERT, layout="dp2", options=_REPRODUCIBLE),
}
CASES |= {name: CASES[name].but(precision="fp32") for name in ("experts", "reproducible")}
REFUSED = (
    (1.0, 0, "norm_type=0; use a number above 0, or inf"),
    (1.0, -math.inf, "norm_type=-inf; use"),
    (1.0, math.nan, "norm_type=nan; use"),
    (1.0, "two", "norm_type='two'; use"),
    (-1.0, 2.0, "max_norm=-1.0; use a number of 0 or more"),
    (None, 2.0, "max_norm=None; use"),
)


def _compare(case: Case) -> None:
    boosted = boost(case)
    plain, batch = case.recipe.model(), case.recipe.batch(0)
    plain(**batch).loss.backward()
    boosted.ordinary_backward(boosted.share(batch))
    close = {"rtol": 1e-5, "atol": 1e-7} if case.recipe.precision == "fp32" else {"rtol": 1e-8, "atol": 1e-14}
    powers = (2.0, 1, 0.5) if case.options == _REPRODUCIBLE else (2.0, 1, 0.5, 3.0)
    for norm_type in (*powers, math.inf, "inf"):
        limit = 0.5 * float(clip_grad_norm_(plain.parameters(), 1e9, norm_type))
        expected = clip_grad_norm_(plain.parameters(), limit, norm_type)
        found = boosted.model.clip_grad_norm_(limit, norm_type=norm_type)
        torch.testing.assert_close(found, expected.double(), **close)
    gradients = boosted.optimizer.full_gradients()
    for name, param in plain.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], param.grad, **close)
    for max_norm, norm_type, message in REFUSED:
        with pytest.raises(ConfigurationError, match=message):
            boosted.model.clip_grad_norm_(max_norm, norm_type)
    if case.options == _REPRODUCIBLE:
        with pytest.raises(ConfigurationError, match="adds up squares of gradients or lower powers, and norm_type=3"):
            boosted.model.clip_grad_norm_(1.0, 3)
    if torch.distributed.get_rank() == 0:
        bucket = next(each for each in boosted.optimizer.buckets if each.used)
        bucket.shard_grads.fill_(math.nan)
    assert math.isnan(boosted.model.clip_grad_norm_(1.0, math.inf)), "on the ranks that have none, too"


@pytest.mark.parametrize("name", CASES)
def test_norms_of_every_type(name: str) -> None:
    run_on_ranks(LAYOUTS[CASES[name].layout].world_size, _compare, CASES[name])
