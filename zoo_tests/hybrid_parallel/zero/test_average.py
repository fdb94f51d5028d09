"""ShardedEMA: equal to torch's AveragedModel of the plain model, under every layout.

What breaks here first: weights that are not those of before after an average was applied (masters of 16 bit), and an
average under another layout than it was saved under. Look in `plugins/hybrid_parallel/zero/average.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaForCausalLM

from booster.errors import ConfigurationError
from plugins.hybrid_parallel import ShardedEMA
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.optimizer_runs import MAKERS, start
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.toy import Pair

DECAY, STEPS, HALF = 0.8, 8, 4
RECIPE = Recipe(family="llama", head="causal_lm", config=(("num_hidden_layers", 2), ("tie_word_embeddings", True)))


@lru_cache
def _plain(maker: str) -> tuple[dict[str, Tensor], float]:
    """Averaged weights after all steps, and their loss on a further batch."""
    model = RECIPE.model()
    optimizers = MAKERS[maker](model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        loss_of(model, RECIPE.zoo_head, RECIPE.batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
    with torch.no_grad():
        loss = loss_of(average.module, RECIPE.zoo_head, RECIPE.batch(STEPS)).item()
    return dict(average.module.state_dict()), loss


def _train(case: Case, maker: str, first: int, last: int, directory: Path) -> float | None:
    """Some steps, from the checkpoint of `first` to that of `last`; at the end the average is evaluated and saved."""
    training = start(case, maker)
    booster, model = training.booster, training.model
    ema = ShardedEMA(*training.optimizers, decay=DECAY)
    if first:
        for index, optimizer in enumerate(training.optimizers):
            booster.load_checkpoint(directory / f"{index}-{first}", model=model, optimizer=optimizer)
        assert ema.num_updates == first
    for step in range(first, last):
        training.step(case.recipe, step)
        ema.update()
    for index, optimizer in enumerate(training.optimizers):
        booster.save_checkpoint(directory / f"{index}-{last}", model=model, optimizer=optimizer)
    if last < STEPS:
        return None
    before = [param.detach().clone() for param in model.parameters()]
    with ema.applied():
        booster.save_model(model, directory / "average")
        loss = _evaluate(training, case.recipe)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return loss


def _evaluate(training: Any, recipe: Recipe) -> float:
    rows = iter([training.share(recipe, STEPS)])
    training.model.eval()
    with torch.no_grad():
        return training.booster.execute_pipeline(rows, training.model).loss.item()


@pytest.mark.parametrize(
    ("maker", "layouts"),
    [
        ("lion", (("tp2", 1), ("dp2", 1))),
        ("lion", (("dp2", 0), ("pp2", 1))),
        pytest.param("muon", (("tp2dp2", 1), ("tp2pp2", 1)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_torchs(maker: str, layouts: tuple[tuple[str, int], ...], tmp_path: Path) -> None:
    """Ten steps on one layout, ten more on another from its checkpoint."""
    loss = None
    for number, (layout, zero_stage) in enumerate(layouts):
        case = Case(recipe=RECIPE, layout=layout, zero_stage=zero_stage)
        loss = run_on_ranks(case.sizes.world_size, _train, case, maker, HALF * number, HALF * (number + 1), tmp_path)[0]
    expected, expected_loss = _plain(maker)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    found = LlamaForCausalLM.from_pretrained(tmp_path / "average", dtype=torch.float64).state_dict()
    assert set(found) == set(expected)
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text
        )


@pytest.mark.slow
@distributed(2)
def test_in_16_bit_the_masters_are_averaged_and_come_back() -> None:
    training = start(Case(recipe=Recipe(family="llama", head="causal_lm", precision="bf16"), layout="dp2"), "lion")
    (optimizer,) = training.optimizers
    ema = ShardedEMA(optimizer, decay=0.5)
    for step in range(3):
        training.step(RECIPE, step)
        ema.update()
    masters = [bucket.shard.values.clone() for bucket in optimizer.buckets]
    shares = [bucket.shard.values.numel() / bucket.flat.numel() for bucket in optimizer.buckets]
    assert set(shares) == {0.5} and all(bucket.shard.values.dtype == torch.float32 for bucket in optimizer.buckets)
    with ema.applied():
        averages = [ema.piece_of(bucket, piece) for bucket in optimizer.buckets for piece in bucket.pieces]
        values = [piece.parameter for bucket in optimizer.buckets for piece in bucket.pieces]
        assert all(torch.equal(average, value) for average, value in zip(averages, values, strict=True))
    assert all(torch.equal(old, new.shard.values) for old, new in zip(masters, optimizer.buckets, strict=True))


@distributed(2)
def test_parameters_that_are_unfrozen_later() -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        model.first.weight.requires_grad_(False)
        return torch.optim.SGD(model.parameters(), lr=0.3)

    pair = Pair.make(make)
    ema = ShardedEMA(pair.optimizer, decay=DECAY)
    plain = AveragedModel(pair.plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(4):
        if step == 2:
            for model in (pair.model.unwrap(), pair.plain):
                model.first.weight.requires_grad_()
        pair.backward(step)
        pair.step()
        ema.update()
        plain.update_parameters(pair.plain)
    pair.plain = plain.module
    with ema.applied():
        pair.check_parameters()


@distributed(2)
def test_a_checkpoint_without_an_average(tmp_path: Path) -> None:
    """And one with an average for an optimizer that has none: its states are those of the optimizer alone."""
    pair = Pair.make(lambda model: torch.optim.Adam(model.parameters(), lr=0.3))
    booster, optimizer = pair.booster, pair.optimizer
    pair.backward(0)
    pair.step()
    booster.save_checkpoint(tmp_path / "without", model=pair.model, optimizer=optimizer)
    ema = ShardedEMA(optimizer)
    ema.update()
    booster.save_checkpoint(tmp_path / "with", model=pair.model, optimizer=optimizer)
    pair.backward(1)
    optimizer.step()
    optimizer.zero_grad()
    booster.load_checkpoint(tmp_path / "without", model=pair.model, optimizer=optimizer)
    assert ema.num_updates == 0
    with ema.applied():
        own = [param.detach().clone() for param in pair.model.parameters()]
    assert all(torch.equal(new, old) for new, old in zip(pair.model.parameters(), own, strict=True))

    other = Pair.make(lambda model: torch.optim.Adam(model.parameters(), lr=0.3))
    other.booster.load_checkpoint(tmp_path / "with", model=other.model, optimizer=other.optimizer)
    keys = {key for state in other.optimizer.state.values() for key in state}
    assert keys == {"step", "exp_avg", "exp_avg_sq"}
    for new, old in zip(other.model.parameters(), own, strict=True):
        assert torch.equal(new, old)


@distributed(2)
def test_what_is_refused(tmp_path: Path) -> None:
    pair = Pair.make(lambda model: torch.optim.SGD(model.parameters(), lr=0.3))
    ema = ShardedEMA(pair.optimizer)
    optimizer: HybridParallelOptimizer = pair.optimizer
    pair.backward(0)
    optimizer.step()
    booster = pair.booster
    inside: list[Callable[[], Any]] = [
        optimizer.step,
        ema.update,
        lambda: booster.save_checkpoint(tmp_path, model=pair.model, optimizer=optimizer),
        lambda: ema.applied().__enter__(),
    ]
    with ema.applied():
        for call in inside:
            with pytest.raises(ConfigurationError, match="the parameters have the values of the average 'ema' now; le"):
                call()
    optimizer.step()
    for make, words in (
        (lambda: ShardedEMA(optimizer), "the optimizer has an average named 'ema'; give this one another name"),
        (lambda: ShardedEMA(optimizer, decay=1.5), r"decay=1.5 is not in \[0, 1\]; use a value such as 0.999"),
        (lambda: ShardedEMA(pair.plain_optimizer), "ShardedEMA got SGD; give it the optimizers that boost"),
        (ShardedEMA, "ShardedEMA got no optimizer; give it"),
        (lambda: ShardedEMA(optimizer, name="a/b"), "name='a/b' cannot be a part of a name in a checkpoint"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            make()
