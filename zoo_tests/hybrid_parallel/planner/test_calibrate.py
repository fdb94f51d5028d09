"""Measuring this machine, on the device that its ranks train on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.planner import calibrate
from plugins.hybrid_parallel.planner.calibrate import Case, MeasuredParts
from plugins.hybrid_parallel.planner.device import Link
from plugins.hybrid_parallel.planner.proxy_model import build_proxy_model
from plugins.hybrid_parallel.shard_report import fake_rank

_META = torch.device("meta")  # stands for a GPU
_SMALL = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)


def test_the_device_outlives_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are measured without the group of the ranks, by which `current_device` knows the device."""
    measured: list[torch.device] = []

    def measure_parts(build: object, config: object, device: torch.device, *sizes: int) -> MeasuredParts:
        assert not dist.is_initialized()
        measured.append(device)
        return MeasuredParts({}, 1e-9)

    monkeypatch.setattr(calibrate, "current_device", lambda: dist.get_backend_config() and _META)
    monkeypatch.setattr(calibrate, "measure_link", lambda device: Link(0.0, 1e9))
    monkeypatch.setattr(calibrate, "_kernels", lambda device, precision: (1e12, 1e6, 1e11))
    monkeypatch.setattr(calibrate, "measure_parts", measure_parts)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    calibrate._measure(nn.Module, 8, "fp32", [Case(tp_size=1, sequence=False, rows=2)])
    assert measured == [_META]


def test_the_mesh_of_the_measured_model_is_on_its_device() -> None:
    """The simulated ranks have fake process groups, which know no device."""
    config = HybridParallelConfig.from_options(tp_size=2)
    with fake_rank(0, 2):
        module, _, wrapped = build_proxy_model(partial(LlamaForCausalLM, _SMALL), config, _META, torch.optim.AdamW)
    (optimizer,) = wrapped.optimizers
    assert wrapped.mesh.device == optimizer.mesh.device == _META
    assert {param.device for param in module.parameters()} == {_META}
