"""A model without values is sharded like one with them, and reads its own pieces afterwards.

What breaks here first: a layer that looks at values while it is cut, or a parameter that two modules hold.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import ShardConfig, ShardFormer
from shardformer.lazy import materialize, set_weight_reader, waits_for_values
from shardformer.shard_spec import ShardSpec
from zoo_tests.case import Recipe
from zoo_tests.ranks import distributed
from zoo_tests.zoo import FAMILIES

_FAST = ("bert", "llama", "t5")


def _without_values(recipe: Recipe) -> nn.Module:
    with init_empty_weights():
        model = recipe.model()
    model.tie_weights()
    return model


class _Reader:
    """Pieces of the values of a whole model; remembers what was asked for."""

    def __init__(self, whole: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in whole.named_parameters(remove_duplicate=False)}
        self.asked: list[str] = []

    def __call__(self, name: str, spec: ShardSpec) -> Tensor:
        self.asked.append(name)
        return spec.shard(self.values[name])


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in _FAST else pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.usefixtures("two_fake_ranks")
def test_every_family_is_sharded_without_values(family: str) -> None:
    recipe = Recipe(family=family, head=FAMILIES[family].main_head)
    whole, lazy = recipe.model(), _without_values(recipe)
    reader = _Reader(whole)
    sharded, _ = ShardFormer(ShardConfig()).optimize(whole)
    lazy, _ = ShardFormer(ShardConfig()).optimize(lazy)
    assert len(waits_for_values(lazy)) == len(list(lazy.parameters()))
    materialize(lazy, reader)
    expected, found = dict(sharded.named_parameters()), dict(lazy.named_parameters())
    assert found.keys() == expected.keys() and reader.asked == list(expected)
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
        assert found[name].shard_spec == parameter.shard_spec


def _losses(recipe: Recipe, is_lazy: bool) -> list[float]:
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=3))
    model = recipe.model()
    if is_lazy:
        reader, model = _Reader(model), _without_values(recipe)
        set_weight_reader(model, reader)
    optimizer, _ = recipe.training(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(2):
        batch = recipe.batch(step)
        losses.append(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # tied over the stages, and not
@distributed(4)
def test_trains_on_from_what_it_read(family: str) -> None:
    recipe = Recipe(family=family, head=FAMILIES[family].main_head, optimizer="adamw")
    assert _losses(recipe, is_lazy=True) == _losses(recipe, is_lazy=False)


@distributed(1)
def test_a_model_without_values_is_refused_where_none_are_known() -> None:
    recipe = Recipe(family="bert", head="sequence")
    with pytest.raises(
        ConfigurationError, match=r"bert.embeddings.word_embeddings.weight of the Bert.* is on the meta"
    ):
        Booster(plugin=HybridParallelPlugin()).boost(_without_values(recipe))
    model = _without_values(recipe)
    set_weight_reader(model, lambda name, spec: torch.zeros(2))
    with pytest.raises(ConfigurationError, match=r"was read has shape \(2,\); this rank holds \(1021, 48\)"):
        Booster(plugin=HybridParallelPlugin()).boost(model)
    with torch.device("meta"):
        model = recipe.model()
    set_weight_reader(model, lambda name, spec: torch.zeros(spec.full_shape))
    with pytest.raises(ConfigurationError, match="buffer .* is on the meta device, where it lost its values"):
        Booster(plugin=HybridParallelPlugin()).boost(model)
