"""Optimizers that read whole parameters, under layouts that cut them: equal to themselves in one process.

What breaks here first: the order of fused, padded and copied shards in a whole matrix, a state that two ranks hold, and
a checkpoint of such a state under another layout. Look in `plugins/hybrid_parallel/zero/whole_parameters.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.optimizer_runs import check_run, numbers_of_states
from zoo_tests.harness.optimizers import Lamb
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import loss_of

HEADS = {"llama": "causal_lm", "gpt2": "lm_head", "bert": "masked_lm", "mixtral": "causal_lm"}
STEPS = 8


def _name(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{case.recipe.family}-{case.layout}" for case in value)


def _case(family: str, layout: str, config: dict[str, Any] | None = None, **options: Any) -> Case:
    fields = {name: options.pop(name) for name in ("zero_stage", "ordinary_loop") if name in options}
    recipe = Recipe(
        family=family,
        head=HEADS[family],
        steps=STEPS,
        config=tuple((config or {}).items()),
        max_norm=0.5,
        precision="fp32" if family == "mixtral" else "fp64",  # its router computes in fp32
    )
    return Case(recipe=recipe, layout=layout, options=tuple(options.items()), **fields)


_SMALL = {"num_hidden_layers": 2}
_TIED = {**_SMALL, "tie_word_embeddings": True}
_FEW = {"n_layer": 2}

RUNS: list[Any] = [
    ("muon", [_case("llama", "tp2", _SMALL)]),
    ("lamb", [_case("gpt2", "tp2", _FEW, zero_stage=0)]),
    *(
        pytest.param(maker, cases, marks=pytest.mark.slow)
        for maker, cases in (
            ("adafactor", [_case("llama", "tp2dp2", _SMALL)]),
            ("muon", [_case("gpt2", "tp2dp2", _FEW)]),
            ("muon", [_case("llama", "tp4", _SMALL), _case("llama", "dp2", _SMALL), _case("llama", "tp2pp2", _SMALL)]),
            ("lamb", [_case("mixtral", "dp2", _SMALL, ep_size=2), _case("mixtral", "tp2", _SMALL)]),
            ("lamb", [_case("llama", "tp2dp2", _TIED, zero_stage=0), _case("llama", "tp2pp2", _TIED)]),
            ("adafactor_of_transformers", [_case("llama", "tp2pp2", _TIED), _case("llama", "tp2", _TIED)]),
        )
    ),
    pytest.param("lamb", [_case("mixtral", "tp2dp2", _SMALL, ep_size=2)], marks=pytest.mark.campaign),
]


@pytest.mark.parametrize(("maker", "cases"), RUNS, ids=_name)
@pytest.mark.slow
def test_equals_plain_training(maker: str, cases: list[Case], tmp_path: Path) -> None:
    """Several steps with clipping; on several layouts, each goes on from the checkpoints of the one before."""
    borders = [STEPS * (number + 1) // len(cases) for number in range(len(cases))]
    check_run(cases, maker, borders, tmp_path)


@pytest.mark.slow
def test_each_rank_has_its_share_of_the_states() -> None:
    numbers = numbers_of_states(_case("llama", "tp2", _SMALL), "muon")
    whole = numbers_of_states(_case("llama", "single", _SMALL), "muon")
    assert sum(numbers) == sum(whole), "each momentum is on one rank"
    assert max(numbers) < 0.6 * sum(whole)


@pytest.mark.slow
@distributed(2)
def test_states_from_before_boost_of_plain_torch_and_of_parameters_unfrozen_later() -> None:
    """Whole states go to the owners; what is loaded is that of the plain optimizer, twice."""
    recipe = Recipe(family="llama", head="causal_lm", config=(("num_hidden_layers", 2),))
    models = [recipe.model(), recipe.model()]
    optimizers = [Lamb(model.parameters()) for model in models]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            _plain_step(recipe, model, optimizer, step)
    plain, plain_optimizer = models[1], optimizers[1]
    for model in models:
        model.model.embed_tokens.weight.requires_grad_(False)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, num_microbatches=2))
    boosted, optimizer = booster.boost(models[0], optimizers[0])
    for step in range(2, 8):
        if step == 4:
            for model in (boosted.unwrap(), plain):
                model.model.embed_tokens.weight.requires_grad_()
        if step == 6:
            own, theirs = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(plain_optimizer.state_dict())
            for state in optimizer.state.values():
                state["second"].zero_()
            for saved in (theirs, own, theirs):
                optimizer.load_state_dict(copy.deepcopy(saved))
        loss = booster.execute_pipeline(iter([recipe.batch(step)]), boosted, optimizer=optimizer).loss
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, _plain_step(recipe, plain, plain_optimizer, step), rtol=1e-10, atol=0.0)


def _plain_step(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = loss_of(model, recipe.zoo_head, recipe.batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
