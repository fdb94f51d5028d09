"""Parameters that are frozen and unfrozen between steps, on every layout, against the same script in plain torch.

What breaks here first: two stages that do not agree whether a gradient comes back. Look in
`plugins/hybrid_parallel/zero/user_optimizer.py` and `pipeline/runtime.py`.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.zero.bucket_layout import Source
from plugins.hybrid_parallel.zero.stage3 import ShardedParameters
from plugins.hybrid_parallel.zero.whole_parameters import assemble
from shardformer.shard_spec import spec_of
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import RankError, distributed, run_on_ranks
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.toy import EXACT, Pair, toy
from zoo_tests.harness.train_sharded import Boosted, boost

# Parts of names, of BERT and of Llama. The first and the last layers are on different stages.
PARTS = {
    "first": ("layer.0.", "layers.0."),
    "middle": ("layer.1.", "layer.2.", "layers.1.", "layers.2."),
    "last": ("layer.3.", "layer.4.", "layers.3.", "layers.4."),
    "head": ("cls", "lm_head", "model.norm"),
    "embeddings": ("embeddings", "embed_tokens"),
}
TIED = ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")
# What takes gradients in each step.
EVENTS: list[tuple[str, ...]] = [
    ("first", "middle", "last", "head", "embeddings"),
    ("last", "head"),  # the first stage is frozen but for a tied weight
    ("last",),  # the first stage is frozen whole
    ("middle", "head", "embeddings"),
    ("first",),  # the last stage is frozen whole
    ("first", "middle", "last", "head", "embeddings"),
    ("last",),
]


def _freeze(model: nn.Module, trained: tuple[str, ...]) -> None:
    """A weight that is tied takes gradients if any of its names says so."""
    parts = [part for key in trained for part in PARTS[key]]
    for name, param in model.named_parameters():
        names = [name, *TIED] if name in TIED else [name]
        param.requires_grad_(any(part in each for part in parts for each in names))


def _check_weights(boosted: Boosted, plain: nn.Module, step: int) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    mesh = boosted.plugin.grid
    for name, param in boosted.model.unwrap().named_parameters():
        found = assemble(param, param.detach(), mesh.group(spec_of(param).axis))
        torch.testing.assert_close(
            found, expected[name].detach(), rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{step} {name}: {text}"
        )


def _train(case: Case, frozen_at_boost: tuple[str, ...] | None) -> None:
    """With momentum and decay, which move whatever has a gradient."""
    plain, head = case.recipe.model(), case.recipe.zoo_head
    optimizer, _ = case.recipe.training(plain)
    boosted = _boosted(case, frozen_at_boost)
    for step, trained in enumerate(EVENTS):
        batch = case.recipe.batch(0)  # of one shape: what stages know of a message is not to outlive a change
        for model in (plain, boosted.model.unwrap()):
            _freeze(model, trained)
        expected = loss_of(plain, head, batch)
        expected.backward()
        if case.ordinary_loop:
            found = boosted.ordinary_backward(boosted.share(batch))
        else:
            found = boosted.pipeline_backward(boosted.share(batch))
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
        for each in (optimizer, boosted.optimizer):
            each.step()
            each.zero_grad()
        _check_weights(boosted, plain, step)


def _boosted(case: Case, frozen: tuple[str, ...] | None) -> Boosted:
    """Boosted while only some parameters are trained."""
    if frozen is None:
        return boost(case)
    booster = Booster(plugin=HybridParallelPlugin(**case.plugin_options))
    model = case.recipe.model()
    _freeze(model, frozen)
    optimizer, scheduler = case.recipe.training(model)
    return Boosted(booster.plugin, booster, *booster.boost(model, optimizer, scheduler))


ZBV = (("pp_style", "zbv"), ("num_microbatches", 4))
CASES = [
    ("bert", "dp2", 1, True, None, ()),
    ("bert", "pp2", 1, False, ("last",), ()),
    ("bert", "tp2pp2", 1, False, None, ()),
    ("bert", "pp2dp2", 1, False, ("first",), ()),
    ("bert", "pp2dp2", 0, False, ("head",), ()),
    ("llama", "pp2", 1, False, ("first",), ZBV),  # two stages on a rank, and backward passes in halves
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "zero_stage", "ordinary", "frozen", "options"), CASES)
def test_equals_plain_torch(
    family: str, layout: str, zero_stage: int, ordinary: bool, frozen: tuple[str, ...] | None, options: tuple
) -> None:
    """`frozen`: what takes gradients when the model is boosted; None for all."""
    recipe = Recipe(family=family, head={"bert": "masked_lm", "llama": "causal_lm"}[family], optimizer="momentum")
    case = Case(recipe=recipe, layout=layout, zero_stage=zero_stage, ordinary_loop=ordinary, options=options)
    run_on_ranks(LAYOUTS[layout].world_size, _train, case, frozen)


def _refused(case: Case, frozen: str) -> None:
    boosted = boost(case)
    for name, param in boosted.model.unwrap().named_parameters():
        param.requires_grad_(frozen not in name)
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        ("", "the loss depends on no parameter that takes gradients"),
        ("embeddings", "is one weight on several pipeline stages, and only some of them have frozen it"),
    ],
)
def test_what_stages_cannot_do_ends_with_one_sentence(frozen: str, message: str) -> None:
    case = Case(recipe=Recipe(family="bert", head="masked_lm"), layout="pp2")
    with pytest.raises(RankError, match=message):
        run_on_ranks(2, _refused, case, frozen)


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_frozen_between_backward_and_step(zero_stage: int) -> None:
    """What has a gradient is moved, as in torch; frozen at boost it still has its optimizer's state from before."""

    def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        model.first.requires_grad_(False)

    pair = Pair.make(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1), step_once, zero_stage=zero_stage)
    for step in range(4):
        for model in (pair.model.unwrap(), pair.plain):
            model.first.weight.requires_grad_(step != 3)
        pair.backward(step)
        for model in (pair.model.unwrap(), pair.plain):
            model.second.weight.requires_grad_(step != 1)
        pair.step()
        pair.check_parameters()
        for model in (pair.model.unwrap(), pair.plain):
            model.second.weight.requires_grad_(True)


@distributed(2)
def test_the_state_of_what_is_frozen_now_survives_a_checkpoint(tmp_path: Path) -> None:
    pair = Pair.make(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    pair.backward(0)
    pair.step()
    pair.booster.save_checkpoint(tmp_path / "state", model=pair.model, optimizer=pair.optimizer)
    model = toy()
    model.first.requires_grad_(False)
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=0))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    booster.load_checkpoint(tmp_path / "state", model=model, optimizer=optimizer)
    resumed = Pair(pair.booster, model, optimizer, pair.plain, pair.plain_optimizer)
    for step, trains in enumerate((False, True), start=1):
        for each in (model.unwrap(), pair.plain):
            each.first.requires_grad_(trains)
        resumed.backward(step)
        resumed.step()
        resumed.check_parameters(**EXACT)


class _TwoPlaces(nn.Module):
    """A layer that runs twice in a row: frozen matrices, as beside an adapter, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        layer[0].requires_grad_(False)
        layer[4].requires_grad_(False)
        self.layers = nn.ModuleList([layer, layer])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@distributed(2)
def test_a_frozen_layer_in_two_places_is_whole_until_both_are_done() -> None:
    torch.manual_seed(0)
    plain = _TwoPlaces().double()
    model = copy.deepcopy(plain)
    booster, fill = Booster(plugin=HybridParallelPlugin(zero_stage=3)), ShardedParameters.fill

    def fill_late(self: ShardedParameters, param: nn.Parameter, source: Source) -> None:
        time.sleep(0.1 * booster.plugin.dp_rank)  # the other rank must not read the shard before
        fill(self, param, source)

    with mock.patch.object(ShardedParameters, "fill", fill_late):
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.layers[0][2].parameters(), lr=1.0))
    x = torch.randn(4, 32, dtype=torch.float64)
    plain(x).square().mean().backward()
    rank = booster.plugin.dp_rank
    booster.backward(model(x[2 * rank : 2 * rank + 2]).square().mean(), optimizer)
    for name, gradient in optimizer.full_gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
