"""Experts each of which a norm follows (Muse Spark), cut over two ranks, against whole ones."""

from __future__ import annotations

import copy
import importlib
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardformer.policies.module_edits import shard_own_parameter, share_input_of_normed_experts
from zoo_tests.harness.ranks import distributed


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
