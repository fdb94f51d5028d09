"""The state dict of the whole model, gathered on every rank, is that of the model before `boost`.

What breaks here first: a tied weight that two stages hold, or a padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.zoo import FAMILIES

_CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied in a pipeline": ("gpt2", 2, {"pp_size": 2}),
    "padded vocabulary": ("gpt2", 2, {"tp_size": 2, "make_vocab_size_divisible_by": 64}),
    "fused projections": ("llama", 2, {"tp_size": 2}),
    "all axes": ("gpt2", 4, {"tp_size": 2, "pp_size": 2}),
    "experts": ("mixtral", 2, {"ep_size": 2}),
}


def _gather(family: str, options: dict[str, Any]) -> None:
    build = FAMILIES[family].build
    model = build(FAMILIES[family].main_head, torch.float64)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    booster = Booster(HybridParallelPlugin(**options))
    found = booster.plugin.checkpoint_io.whole_state_dict(booster.boost(model))
    torch.testing.assert_close(dict(found), expected, rtol=0, atol=0)
    plain = build(FAMILIES[family].main_head, torch.float64)
    assert not any(plain.load_state_dict(found)), "no name is missing or unexpected"


@pytest.mark.parametrize("name", _CASES)
def test_every_rank_has_every_weight(name: str) -> None:
    family, world_size, options = _CASES[name]
    run_on_ranks(world_size, _gather, family, options)
