"""Attention through transformers' registries: masks stay, kernels stay, dropout is drawn a rank.

What breaks here first: a release of transformers that looks masks or kernels up by another name (the padding mask is
lost without an error). Look in `shardformer/attention/registry.py`.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from _pytest.mark.structures import ParameterSet
from torch import Tensor, nn

from shardformer import ShardConfig, ShardFormer
from shardformer.attention.registry import RegisteredName
from shardformer.distributed.random import SharedStream
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES

ATTENTIVE = sorted(name for name, family in FAMILIES.items() if family.attention_dropout is not None)
REGISTERED = [name for name in ATTENTIVE if not FAMILIES[name].attention_by_hand]


# One family of each kind of attention, for daily use.
_DAILY = ("bert", "gpt2", "llama", "t5", "vit")


def _marked(number: int, family: str, *values: str) -> ParameterSet:
    """Mark the daily ones as fast; of the others every second is in the suite, the rest in the campaigns."""
    marks = pytest.mark.campaign if number % 2 else pytest.mark.slow
    return pytest.param(family, *values, marks=() if family in _DAILY else marks)


def _head(family: str) -> str:
    heads = FAMILIES[family].heads
    return "token" if "token" in heads else FAMILIES[family].main_head


# fp32: eager attention's softmax is in fp32 always, where the mask's value for fp64 is infinite.
def _model(family: str, implementation: str, dropout: float = 0.0) -> nn.Module:
    model = FAMILIES[family].build(_head(family), torch.float32, **{FAMILIES[family].attention_dropout: dropout})
    model.set_attn_implementation(implementation)
    return model


def _found(model: nn.Module, family: str) -> Tensor:
    outputs = model(**FAMILIES[family].batch(_head(family), 0, 4, torch.float32))
    return next(outputs[name] for name in ("logits", "start_logits", "last_hidden_state") if name in outputs)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        _marked(number + shift, family, implementation)
        for shift, implementation in enumerate(("sdpa", "eager"))
        for number, family in enumerate(REGISTERED)
    ],
)
@distributed(2)
def test_padding_masks_reach_the_kernel(family: str, implementation: str) -> None:
    """Batches padded on the left and on the right."""
    native = _model(family, implementation)
    sharded, _ = ShardFormer(ShardConfig()).optimize(copy.deepcopy(native))
    assert native.config._attn_implementation == implementation, "the native model is left alone"
    torch.testing.assert_close(_found(sharded, family), _found(native, family), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [_marked(number, family, "eager") for number, family in enumerate(ATTENTIVE)]
    + [_marked(number + 1, family, "sdpa") for number, family in enumerate(REGISTERED)],
)
@distributed(2)
def test_ranks_drop_other_entries(family: str, implementation: str) -> None:
    """Equal weights on both ranks: without dropout their heads find the same, with it they do not."""
    for dropout in (0.0, 0.5):
        model, _ = ShardFormer(ShardConfig()).optimize(_model(family, implementation, dropout))
        for param in model.parameters():
            if (
                param.shard_spec.on_rank(0).local_shape == param.shard_spec.on_rank(1).local_shape
            ):  # not of feed-forwards
                dist.broadcast(param.data, 0)
        seen = _inputs_of_output_projection(model, family)
        of_ranks = [torch.empty_like(seen) for _ in range(2)]
        dist.all_gather(of_ranks, seen)
        assert torch.equal(*of_ranks) == (dropout == 0.0), f"dropout {dropout}"


def _inputs_of_output_projection(model: nn.Module, family: str) -> Tensor:
    """What the first attention's heads found, [batch, seq, local features]."""
    path = FAMILIES[family].attention_output
    projection = next(module for name, module in model.named_modules() if name.endswith(path))
    seen: list[Tensor] = []
    hook = projection.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    with SharedStream(1).active():
        _found(model, family)
    hook.remove()
    return seen[0].contiguous()


def test_a_registered_name_equals_its_kernels_name_and_is_found_by_its_own() -> None:
    name = RegisteredName("context_", RegisteredName("sharded_", "sdpa"))
    for each in (name, copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert each in ("eager", "sdpa") and each == "context_sharded_sdpa"
        assert not each != "sdpa" and each != "eager" and each != None  # noqa: E711, SIM202
        assert {"context_sharded_sdpa": 1, "sdpa": 2}[each] == 1
