"""A loop of plain torch over a sharded model trains to the numbers of the whole model, or is refused in a sentence.

What breaks here first: a parameter with a partial gradient that nobody sums. Look in
`shardformer/layers/parallel_module.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import ShardConfig, ShardFormer, ShardModel
from shardformer.shard_spec import spec_of
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import loss_of

_STEPS = 3
_QWEN3 = Recipe(family="qwen3", head="sequence")
_LLAMA = Recipe(family="llama", head="sequence", config=(("num_key_value_heads", 1),))


def _train(model: nn.Module, recipe: Recipe) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(_STEPS):
        loss_of(model, recipe.zoo_head, recipe.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)
    return model


def _whole(recipe: Recipe) -> nn.Module:
    """A model that trains all of its parameters after one step."""
    model = recipe.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_norm" not in name and "k_proj" not in name)
    return model


def _compare(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        piece = spec_of(parameter).shard(expected[name].detach())
        torch.testing.assert_close(parameter.detach(), piece, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@distributed(2)
def test_shard_model_trains_in_a_plain_loop() -> None:
    # Norms of heads; one key/value head that both ranks hold.
    for recipe in (_QWEN3, _LLAMA):
        whole = _whole(recipe)
        _compare(_train(ShardModel(copy.deepcopy(whole)).model, recipe), _train(whole, recipe))


@distributed(2)
def test_sequence_parallel_models_train_in_a_plain_loop() -> None:
    recipe = Recipe(family="bert", head="sequence")
    whole = recipe.model()
    model, _ = ShardFormer(ShardConfig(enable_sequence_parallelism=True)).optimize(copy.deepcopy(whole))
    _compare(_train(model, recipe), _train(whole, recipe))


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_size": 2}], ids=["tp2", "dp2"])
@distributed(2)
def test_a_model_without_its_optimizer_refuses_backward(layout: dict[str, int]) -> None:
    recipe = Recipe(family="bert", head="sequence")
    model = Booster(plugin=HybridParallelPlugin(**layout)).boost(recipe.model())
    loss = model(**recipe.batch(0)).loss
    with pytest.raises(ConfigurationError, match=r"without its optimizer.*booster\.boost\(model, optimizer\)"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
