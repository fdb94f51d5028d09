"""Changes that a rank's part of experts and of feed-forwards needs, against whole ones.

What fails here first: the statistics of Gemma 3n's sparse activation over uneven shares, and of a token whose features
are all equal; a plan that cuts what a rank cannot compute from its own features; norms behind experts (Muse Spark); and
the grouped matmul, which needs rows of whole 16 bytes.
"""

from __future__ import annotations

import copy
import importlib
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.policies.feature_counts import functions_of_all_features
from shardformer.policies.module_edits import (
    mean_and_deviation,
    shard_own_parameter,
    share_expert_inputs,
    share_input_of_normed_experts,
)
from zoo_tests.harness.ranks import distributed


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize(("features", "is_aligned"), [(16, True), (24, False), (32, True)])
def test_rows_that_are_aligned_in_fp32_alone_run_one_by_one(features: int, is_aligned: bool) -> None:
    """Half of 24 features are 48 bytes in fp32, and 24 after the weights are rounded to 16 bits."""
    config = MixtralConfig(hidden_size=32, intermediate_size=features, num_local_experts=2)
    config._experts_implementation = "grouped_mm"
    experts = MixtralExperts(config)
    share_expert_inputs(experts, dist.group.WORLD)
    assert experts.config._experts_implementation == ("grouped_mm" if is_aligned else "eager")
    assert config._experts_implementation == "grouped_mm", "other modules share it"


@pytest.mark.skipif(find_spec("transformers.models.muse_spark") is None, reason="transformers before 5.20")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@distributed(2)
def test_the_norm_of_an_expert_reads_whole_outputs(implementation: str) -> None:
    family = importlib.import_module("transformers.models.muse_spark")
    config = family.MuseSparkTextConfig(num_local_experts=3, moe_hidden_size=8, moe_intermediate_size=16)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    native = family.modeling_muse_spark.MuseSparkExperts(config)
    for parameter in native.parameters():
        nn.init.normal_(parameter, std=0.5)
    cut, group = copy.deepcopy(native), dist.group.WORLD
    shard_own_parameter(cut, name="gate_up_proj", from_end=2, num_parts=2, group=group)
    shard_own_parameter(cut, name="down_proj", from_end=1, num_parts=1, group=group)
    share_input_of_normed_experts(cut, group)

    index = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    found = []
    for experts in (native, cut):
        hidden, weights = (torch.linspace(-1, 2, 5 * size).reshape(5, size).requires_grad_() for size in (8, 2))
        output = experts(hidden, index, weights)
        output.square().sum().backward()
        found.append((output, hidden.grad, weights.grad, experts.post_expert_norm.weight.grad))
    for plain, sharded in zip(*found, strict=True):
        torch.testing.assert_close(sharded, plain, rtol=1e-4, atol=1e-4)
    for name in ("gate_up_proj", "down_proj"):
        spec = cut.get_parameter(name).shard_spec
        torch.testing.assert_close(
            cut.get_parameter(name).grad, spec.shard(native.get_parameter(name).grad), rtol=1e-4, atol=1e-4
        )


@distributed(2)
def test_statistics_of_uneven_shares() -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 4, 7, dtype=torch.float64)
    whole[0, 1], whole[2, 3] = 0.0, 5.0  # without a deviation: the gradient of a root would be infinite
    weights = torch.randn(2, 3, 4, 1, dtype=torch.float64)
    plain = whole.clone().requires_grad_()
    expected = plain.mean(-1, keepdim=True), plain.std(-1, keepdim=True, correction=0)
    sum((value * weight).sum() for value, weight in zip(expected, weights, strict=True)).backward()

    own = slice(0, 4) if dist.get_rank() == 0 else slice(4, 7)
    part = whole[..., own].clone().requires_grad_()
    found = mean_and_deviation(part, [4 / 7, 3 / 7], dist.group.WORLD)
    sum((value * weight).sum() for value, weight in zip(found, weights, strict=True)).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(part.grad, plain.grad[..., own])


class _Mixed(nn.Module):
    """A feed-forward of Granite whose gates are divided by what `reduced` makes of all of them."""

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = native.gate_proj, native.up_proj, native.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate_proj(x)
        return self.down_proj(self.reduced(gates) * gates * self.up_proj(x))


class _Softmax(_Mixed):
    def reduced(self, gates: Tensor) -> Tensor:
        return gates.softmax(-1)


class _Largest(_Mixed):
    def reduced(self, gates: Tensor) -> Tensor:
        return (gates >= torch.topk(gates, 3, dim=-1).values[..., -1:]).to(gates.dtype)


class _Normed(_Mixed):
    def __init__(self, native: nn.Module) -> None:
        super().__init__(native)
        self.reduced = nn.LayerNorm(native.gate_proj.out_features, elementwise_affine=False)


@pytest.mark.parametrize("mixed", [_Softmax, _Largest, _Normed])
@distributed(2)
def test_a_feed_forward_that_mixes_features_stays_whole(mixed: type[_Mixed]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "pad_token_id": 0,
        }
        model = GraniteForCausalLM(GraniteConfig(vocab_size=24, num_hidden_layers=1, **sizes)).double()
        model.model.layers[0].mlp = mixed(model.model.layers[0].mlp)
        return model

    plain, ids = build(), torch.arange(2, 12).view(2, 5)
    plain(input_ids=ids, labels=ids).loss.backward()
    model = build()
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.execute_pipeline({"input_ids": ids, "labels": ids}, model, optimizer=optimizer)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(dict(optimizer.full_gradients()), expected, rtol=1e-4, atol=1e-7)  # norms of fp32


def test_activations_and_norms_behind_the_rows_mix_no_features() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down, self.norm = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.down(self.act(self.up(x))))

    assert functions_of_all_features(Block()) == set()
