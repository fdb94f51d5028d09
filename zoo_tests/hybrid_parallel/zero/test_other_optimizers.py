"""Optimizers from elsewhere, over several steps: 8-bit states, schedule-free, Lion; equal to themselves in one process.

What breaks here first: blocks of 8-bit states that begin where a shard begins, and weights that an optimizer changes
outside of its step. Look in `plugins/hybrid_parallel/zero/granularity.py` and `optimizer.py`.
"""

from __future__ import annotations

import importlib.util
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon
from transformers import LlamaForCausalLM

from plugins.hybrid_parallel.zero import user_optimizer
from shardformer.shard_spec import spec_of
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.optimizer_runs import MAKERS, check_run, start
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.reference import loss_of

STEPS = 8
_RECIPE = Recipe(family="llama", head="causal_lm", steps=STEPS, config=(("num_hidden_layers", 2),), max_norm=0.5)


def _cases(*layouts: tuple[str, int]) -> list[Case]:
    return [Case(recipe=_RECIPE, layout=layout, zero_stage=zero_stage) for layout, zero_stage in layouts]


@pytest.mark.parametrize(
    ("maker", "layouts"),
    [
        ("lion", [("tp2", 1), ("dp2", 0), ("pp2", 1)]),
        ("blockwise", [("dp2", 1), ("tp2", 1), ("pp2", 1)]),
        pytest.param("blockwise", [("tp2dp2", 1), ("tp2pp2", 1)], marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_equals_plain_training(maker: str, layouts: list[tuple[str, int]], tmp_path: Path) -> None:
    """Some steps on each layout, each from the checkpoint of the one before."""
    cases = _cases(*layouts)
    check_run(cases, maker, [STEPS * (number + 1) // len(cases) for number in range(len(cases))], tmp_path)


def _gradient(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(shape, generator=generator)


def _step_with_given_gradients(case: Case, maker: str, first: int, last: int, directory: Path) -> None:
    """Gradients that are the same bits under every layout, in the place of those of a pass."""
    training = start(case, maker)
    (optimizer,) = training.optimizers
    if first:
        training.booster.load_checkpoint(directory / str(first), model=training.model, optimizer=optimizer)
    for step in range(first, last):
        batches = iter([training.share(case.recipe, step)])
        training.booster.execute_pipeline(batches, training.model, optimizer=optimizer)
        for bucket in optimizer.buckets:
            for piece in bucket.pieces:
                param = bucket.params[piece.index]
                given = _gradient(optimizer.names[param], step, spec_of(param).full_shape)
                piece.view(bucket.shard_grads).copy_(spec_of(param).shard(given).flatten()[piece.start : piece.stop])
        optimizer.step()
        optimizer.zero_grad()
    training.booster.save_checkpoint(directory / str(last), model=training.model, optimizer=optimizer)
    training.booster.save_model(training.model, directory / "model")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("layouts", [["dp2", "tp2"], ["tp2", "pp2"]], ids=str)
@pytest.mark.slow
def test_bitsandbytes_in_8_bit(layouts: list[str], tmp_path: Path) -> None:
    """The very same bits: blocks of 256 elements are those of whole parameters. It knows no fp64."""
    recipe = replace(_RECIPE, precision="fp32", max_norm=None)
    for number, layout in enumerate(layouts):
        border = STEPS // 2 * number
        case = Case(recipe=recipe, layout=layout)
        run_on_ranks(2, _step_with_given_gradients, case, "adamw_8bit", border, border + STEPS // 2, tmp_path)
    model = recipe.model()
    (optimizer,) = MAKERS["adamw_8bit"](model)
    for step in range(STEPS):
        for name, param in model.named_parameters():
            param.grad = _gradient(name, step, tuple(param.shape))
        optimizer.step()
    assert any(state["state1"].dtype == torch.uint8 for state in optimizer.state.values())
    found = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


def _evaluate(case: Case) -> list[float]:
    """The loss in evaluation mode after some steps, after further ones, and that of training mode again."""
    training = start(case, "schedule_free")
    (optimizer,) = training.optimizers
    losses = []
    for step in range(STEPS):
        optimizer.train()
        training.step(case.recipe, step)
        if step % 3 == 2:
            optimizer.eval()
            losses.append(_loss(training, case.recipe))
            optimizer.train()
            losses.append(_loss(training, case.recipe))
    return losses


def _loss(training: Any, recipe: Recipe) -> float:
    with torch.no_grad():
        batches = iter([training.share(recipe, STEPS)])
        return training.booster.execute_pipeline(batches, training.model).loss.item()


def _evaluate_plain(recipe: Recipe) -> list[float]:
    model, losses = recipe.model(), []
    (optimizer,) = MAKERS["schedule_free"](model)
    for step in range(STEPS):
        optimizer.train()
        loss_of(model, recipe.zoo_head, recipe.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            for switch in (optimizer.eval, optimizer.train):
                switch()
                with torch.no_grad():
                    losses.append(loss_of(model, recipe.zoo_head, recipe.batch(STEPS)).item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2", "pp2"])
def test_schedule_free_optimizers_switch_the_weights_of_all_ranks(layout: str) -> None:
    recipe = replace(_RECIPE, max_norm=None)
    found = run_on_ranks(2, _evaluate, Case(recipe=recipe, layout=layout))
    expected = _evaluate_plain(recipe)
    assert len(set(expected)) == len(expected), "both modes have weights of their own"
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("most", [2**26, 30])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_in_batches_is_that_of_torch(nesterov: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit on a CPU, for matrices of several shapes, all in a batch or at most one or two."""
    monkeypatch.setattr(user_optimizer, "_MOST_IN_A_BATCH", most)
    shapes = [(6, 4), (4, 6), (6, 4), (5, 5), (4, 6)]
    options = dict(lr=0.02, weight_decay=0.5, momentum=0.95, nesterov=nesterov, eps=1e-7, ns_steps=5)
    options |= dict(ns_coefficients=(3.4445, -4.775, 2.0315), adjust_lr_fn=None, has_complex=False)
    kinds: list[list[list[Tensor]]] = []
    for update in (_muon.muon, user_optimizer.batched_muon):
        generator = torch.Generator().manual_seed(0)
        tensors = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
        update(*tensors, **options)
        kinds.append(tensors)
    for one, other in zip(*map(sum, kinds, ([], [])), strict=True):
        assert torch.equal(one, other)
