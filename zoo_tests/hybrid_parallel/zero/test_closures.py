"""`optimizer.step(closure)`: the user's optimizer evaluates the closure, with weights and gradients of all ranks.

What breaks here first: an evaluation that sees weights from before what the optimizer has changed, and gradients of an
earlier evaluation. Look in `plugins/hybrid_parallel/zero/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.optimizers import SAM, PointwiseSAM, TrustAdamW
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.toy import Pair, global_batch, share_of

STEPS = 8


def _train(pair: Pair, ordinary: bool = False, steps: int = STEPS) -> list[int]:
    """Both sides step with a closure; returns how often each was evaluated in all."""
    evaluations = [0, 0]

    def sharded(step: int) -> Tensor:
        evaluations[0] += 1
        pair.optimizer.zero_grad()
        return pair.sharded_backward(step, 6, ordinary)

    def plain(step: int) -> Tensor:
        evaluations[1] += 1
        pair.plain_optimizer.zero_grad()
        return pair.plain_backward(step, 6)

    for step in range(steps):
        found = pair.optimizer.step(partial(sharded, step))
        expected = pair.plain_optimizer.step(partial(plain, step))
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)
        pair.check_parameters(rtol=1e-9, atol=1e-12)
    assert evaluations[0] == evaluations[1]
    return evaluations


@pytest.mark.slow
@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_equals_plain_torch(zero_stage: int, ordinary: bool) -> None:
    makers: list[tuple[Callable[[nn.Module], torch.optim.Optimizer], int]] = [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 1),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), 1),
        (lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01), 1),
        (lambda model: PointwiseSAM(model.parameters()), 2),
    ]
    if zero_stage == 0:
        makers.append((lambda model: SAM(model.parameters()), 2))
    for make, times in makers:
        assert _train(Pair.make(make, zero_stage=zero_stage), ordinary)[0] == times * STEPS


@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@distributed(2)
def test_lbfgs_with_replicas_alone(line_search: str | None, ordinary: bool) -> None:
    """A search compares losses, which must be those of all ranks."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=line_search)

    assert _train(Pair.make(make, zero_stage=0), ordinary, steps=5)[0] > 5


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
@distributed(2)
@pytest.mark.slow
def test_under_tensor_parallelism_and_in_a_pipeline(options: dict[str, int]) -> None:
    """With parts of parameters, and with whole ones, which every evaluation publishes."""
    recipe = Recipe(family="llama", head="causal_lm", config=(("num_hidden_layers", 2),))
    for make in (PointwiseSAM, TrustAdamW):
        model, plain = recipe.model(), recipe.model()
        booster = Booster(plugin=HybridParallelPlugin(zero_bucket_size_in_mb=0.1, num_microbatches=2, **options))
        model, optimizer = booster.boost(model, make(model.parameters()))
        reference = make(plain.parameters())

        def sharded(step: int, booster: Any = booster, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            return booster.execute_pipeline(iter([recipe.batch(step)]), model, optimizer=optimizer).loss

        def whole(step: int, plain: nn.Module = plain, reference: Any = reference) -> Tensor:
            reference.zero_grad()
            loss = loss_of(plain, recipe.zoo_head, recipe.batch(step))
            loss.backward()
            return loss.detach()

        for step in range(5):
            found, expected = optimizer.step(partial(sharded, step)), reference.step(partial(whole, step))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)


@distributed(2)
def test_a_closure_may_add_to_gradients_from_before() -> None:
    pair = Pair.make(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))

    def plain() -> Tensor:
        return pair.plain_backward(1)

    for step in range(3):
        pair.backward(step)
        pair.optimizer.step(lambda: pair.sharded_backward(1))
        pair.plain_optimizer.step(plain)
        pair.check_parameters()
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()


@pytest.mark.slow
@distributed(2)
def test_what_is_refused(tmp_path: Path) -> None:
    for options, reason in (({"precision": "fp16"}, "precision='fp16'"), ({"nonfinite": "skip"}, "nonfinite='skip'")):
        pair = Pair.make(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **options)
        with pytest.raises(ConfigurationError, match=f"cannot skip a step in the middle, as {reason} asks for; use"):
            pair.optimizer.step(lambda: 0.0)
    pair = Pair.make(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))

    def evaluates_only() -> Tensor:
        return pair.booster.execute_pipeline(iter([share_of(global_batch(0))]), pair.model).loss

    with pytest.raises(ConfigurationError, match="finds no gradients, because booster.execute_pipeline ran without"):
        pair.optimizer.step(evaluates_only)
    with pytest.raises(RuntimeError, match=r"call booster.backward\(loss, optimizer\) instead of loss.backward"):
        pair.optimizer.step(lambda: pair.model(x=global_batch(0)["x"]).sum().backward())
    pair = Pair.make(lambda model: SAM(model.parameters()), zero_stage=0)
    with pytest.raises(ConfigurationError, match=r"optimizer.first_step\(\) would find no gradients, which boost"):
        pair.optimizer.first_step(zero_grad=True)
    pair = Pair.make(lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1), zero_stage=0)
    _train(pair, steps=2)
    pair.optimizer.zero_grad()
    with pytest.raises(ConfigurationError, match="a checkpoint cannot hold the state 'al' of LBFGS, a list; save the"):
        pair.booster.save_optimizer(pair.optimizer, tmp_path)
    with pytest.raises(ConfigurationError, match="LBFGS updates each parameter from the values of others, which zero"):
        Pair.make(lambda model: torch.optim.LBFGS(model.parameters()))
