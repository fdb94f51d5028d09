"""The layers of a model are chosen for the device of its layout, not for the machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.setup import model as setup
from shardformer import ShardConfig
from zoo_tests.zoo import FAMILIES


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_kernels_are_chosen_for_the_device_of_the_mesh(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ShardConfig] = []

    def shard_former(config: ShardConfig) -> SimpleNamespace:
        seen.append(config)
        return SimpleNamespace(optimize=lambda model, policy: (model, []))

    monkeypatch.setattr(setup, "ShardFormer", shard_former)
    mesh = SimpleNamespace(device=torch.device(device), group=lambda axis: None, rank=lambda axis: 0)
    plugin = HybridParallelPlugin(enable_flash_attention=True)
    setup.shard_model(FAMILIES["llama"].build("causal_lm"), plugin.config, mesh)
    assert seen[0].device == torch.device(device)
