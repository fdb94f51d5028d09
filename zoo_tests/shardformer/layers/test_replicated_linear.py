"""Layers that replace native ones: the same state, names, hooks and numbers, also in copies and pickles.

What breaks here first: a module under a second name that stays native, a copy that shares weights with its original.
Look in `shardformer/layers/parallel_module.py` and `shardformer/utils/derived_modules.py`.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.layers import parallel_module as ours
from shardformer.layers.parallel_module import defer_weight_grads, replace_native_layers
from shardformer.matmul.kernel import WeightGradStore, run_deferred
from shardformer.utils.derived_modules import derive
from zoo_tests.harness.ranks import distributed


class Narrow(nn.Linear):
    """A class of a user, with the forward of its base."""


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.first, self.narrow, self.conv, self.scaled = nn.Linear(4, 4), Narrow(4, 4), Conv1D(4, 4), Scaled(4, 4)
        self.again = self.first
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.scaled(self.again(self.conv(self.narrow(self.first(self.table(ids))))))


IDS = torch.tensor([[1, 2, 3], [6, 2, 1]])


def test_replaced_layers_keep_state_and_names() -> None:
    model, plain = Model(), Model()
    parameters, first, scaled = dict(model.named_parameters()), model.first, model.scaled
    first.extra = "kept"
    handle = first.register_forward_hook(lambda _, __, output: output + 1)
    replace_native_layers(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(model.get_parameter(name) is each for name, each in parameters.items())
    assert type(model.first) is ours.Linear and model.again is model.first and model.first.extra == "kept"
    assert isinstance(model.narrow, Narrow) and isinstance(model.narrow, ours.Linear)
    assert isinstance(model.conv, Conv1D) and isinstance(model.table, ours.Embedding)
    assert model.scaled is scaled
    assert not torch.equal(model(IDS), plain(IDS))
    handle.remove()  # registered on the native layer
    assert torch.equal(model(IDS), plain(IDS))
    first.eval()
    assert not model.first.training


def test_a_forward_of_an_object_is_kept() -> None:
    model = Model()
    first = model.first
    first.forward = lambda input: 3 * input
    replace_native_layers(model)
    assert model.first is first


@pytest.mark.parametrize("kind", ["copy", "pickle", "copy of a copy"])
def test_copies_have_their_own_state(kind: str) -> None:
    model, store = Model(), WeightGradStore()
    defer_weight_grads(model, store)
    expected = model(IDS)
    made = pickle.loads(pickle.dumps(model)) if kind == "pickle" else copy.deepcopy(model)
    made = copy.deepcopy(made) if kind == "copy of a copy" else made
    assert [type(each) for each in made.modules()] == [type(each) for each in model.modules()]
    assert made.again is made.first and torch.equal(made(IDS), expected)
    with torch.no_grad():
        made.narrow.weight.zero_()
    assert torch.equal(model(IDS), expected) and not torch.equal(made(IDS), expected)
    assert made.first.weight_grad_store is made.conv.weight_grad_store is not store


def test_a_class_can_be_derived_twice() -> None:
    class Twice(nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return 2 * super().forward(*args)

    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    new = derive(derive(layer, ours.Linear), Twice)
    assert torch.equal(new(x), 2 * layer(x)) and torch.equal(copy.deepcopy(new)(x), 2 * layer(x))


def test_a_model_that_is_one_layer_keeps_its_identity() -> None:
    layer = nn.Linear(4, 4)
    replace_native_layers(layer)
    assert type(layer) is ours.Linear


def test_parametrized_weights_keep_their_parametrization() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model, plain = Model(), Model()
    for each in (model, plain):
        parametrize.register_parametrization(each.first, "weight", Doubled())
    defer_weight_grads(model, store := WeightGradStore())
    assert torch.equal(model(IDS), plain(IDS))
    deferred: list = []
    with store.split_backward():
        loss = model(IDS).square().sum()
    with store.split_backward(deferred):
        loss.backward()
    run_deferred(deferred)
    plain(IDS).square().sum().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, param.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_two_models_defer_apart() -> None:
    models, stores = (Model(), Model()), (WeightGradStore(), WeightGradStore())
    for model, store in zip(models, stores, strict=True):
        defer_weight_grads(model, store)
    deferred: list = []
    with stores[0].split_backward(), stores[1].split_backward():
        losses = [model(IDS).sum() for model in models]
    with stores[0].split_backward(deferred):
        for loss in losses:
            loss.backward()
    assert models[0].narrow.weight.grad is None and models[1].narrow.weight.grad is not None


@distributed(2)
def test_parallel_layers_defer_theirs() -> None:
    natives = nn.Linear(4, 4), nn.Linear(4, 4)
    kinds = ColumnParallelLinear, RowParallelLinear
    layers = [kind.from_native_module(native, dist.group.WORLD) for kind, native in zip(kinds, natives, strict=True)]
    model, store = nn.Sequential(*layers), WeightGradStore()
    defer_weight_grads(model, store)
    deferred: list = []
    with store.split_backward():
        loss = model(torch.ones(2, 4)).sum()
    with store.split_backward(deferred):
        loss.backward()
    assert [parameter for parameter, _ in deferred] == [layers[1].weight, layers[0].weight]
    assert layers[0].weight.grad is None and layers[0].bias.grad is not None
    run_deferred(deferred)
    assert layers[0].weight.grad is not None and layers[1].weight.grad is not None
