"""The JSON form: what it means, and one sentence for each mistake in it."""

from __future__ import annotations

from typing import Any

import pytest

from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelConfig, HybridParallelPlugin
from plugins.hybrid_parallel.distributed.mesh import MappedDevice, in_blocks

# The example of the description that this form follows: eight stages on cards of five numbers each.
EXAMPLE = {
    "mode": "sharding",
    "sharding_size": 4,
    "sharding_dim": -1,
    "stage_cnt": 8,
    "accum_degree": 1,
    "device_mapping": {
        f"stage_{stage}": {f"shard_{shard}": f"/device:XLA_DTU:{5 * stage + shard}" for shard in range(4)}
        for stage in range(8)
    },
}


def test_the_example() -> None:
    options = HybridParallelPlugin.from_config(EXAMPLE).config.options()
    assert (options["tp_size"], options["pp_size"], options["num_microbatches"], options["sharding_dim"]) == (
        4,
        8,
        1,
        -1,
    )
    assert options["device_mapping"]["stage_7"]["shard_3"] == "/device:XLA_DTU:38"


def test_defaults_overrides_and_options_beside() -> None:
    options = HybridParallelPlugin.from_config(
        {"mode": "pipeline", "stage_cnt": 2, "precision": "bf16"}, max_norm=1.0
    ).config.options()
    expected = {"tp_size": 1, "pp_size": 2, "num_microbatches": 1, "precision": "bf16", "max_norm": 1.0}
    assert options == HybridParallelConfig.from_options(**expected).options()
    plugin = HybridParallelPlugin.from_config({"mode": "hybrid", "accum_degree": 4, "stage_cnt": 2})
    assert plugin.config.pipeline.num_microbatches == 4


ONE = {"stage_0": {"shard_0": 0}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"sharding_size": 2}, "the key 'mode' is missing; use 'mode': 'hybrid'"),
        ({"mode": "shard"}, "mode='shard' is not available; use 'sharding', 'pipeline' or 'hybrid'"),
        ({"mode": "hybrid", "sharding_size": 0}, "sharding_size=0 is not a positive integer; use 1 or more"),
        ({"mode": "hybrid", "stage_cnt": "2"}, "stage_cnt='2' is not a positive integer; use 1 or more"),
        ({"mode": "hybrid", "accum_degree": True}, "accum_degree=True is not a positive integer; use 1 or more"),
        (
            {"mode": "hybrid", "sharding_dim": 1},
            "sharding_dim=1 is no dim; use 0 (reduction), -1 (output) or leave it out",
        ),
        ({"mode": "hybrid", "shard_size": 2}, "the key 'shard_size' is not known; use sharding_size"),
        ({"mode": "hybrid", "tp_size": 2}, "tp_size cannot be combined with mode=...; use sharding_size there"),
        (
            {"mode": "hybrid", "precision": "fp9"},
            "precision='fp9' is not available; use 'fp32' or 'bf16' or 'fp16' or 'fp8'",
        ),
        (
            {"mode": "pipeline", "sharding_size": 2},
            "mode='pipeline' does not shard layers, and sharding_size=2 does; use mode='hybrid' or sharding_size=1",
        ),
        (
            {"mode": "sharding", "stage_cnt": 2, "accum_degree": 4},
            "mode='sharding' runs its stages one after the other, and accum_degree=4 pipelines micro-batches through "
            "them; use mode='hybrid' or accum_degree=1",
        ),
        (
            {"mode": "hybrid", "stage_cnt": 2, "device_mapping": ONE},
            "device_mapping has no stage_1; stage_cnt (pp_size)=2 needs stage_0 to stage_1",
        ),
        (
            {"mode": "hybrid", "device_mapping": {**ONE, "stage_1": {"shard_0": 1}}},
            "device_mapping has a stage_1; stage_cnt (pp_size)=1 needs stage_0 to stage_0",
        ),
        (
            {"mode": "hybrid", "sharding_size": 2, "device_mapping": ONE},
            "device_mapping['stage_0'] has no shard_1; sharding_size (tp_size)=2 needs shard_0 to shard_1",
        ),
        (
            {
                "mode": "hybrid",
                "sharding_size": 2,
                "device_mapping": {"stage_0": {"shard_0": "cuda:1", "shard_1": "cuda:1"}},
            },
            "device_mapping names 'cuda:1' twice; give every shard a device of its own",
        ),
        (
            {"mode": "hybrid", "device_mapping": {"stage_0": {"shard_0": "cuda"}}},
            "device_mapping['stage_0']['shard_0']='cuda' is no device; use 'cuda:3', 'cpu:2', 'host/cuda:3' or a rank "
            "such as 3",
        ),
        (
            {"mode": "hybrid", "device_mapping": [0]},
            "device_mapping=[0] is no mapping; use {'stage_0': {'shard_0': 'cuda:0'}}",
        ),
        (
            {"mode": "hybrid", "device_mapping": {"stage_0": [0]}},
            "device_mapping['stage_0']=[0] is no mapping; use {'shard_0': 'cuda:0'}",
        ),
    ],
)
def test_a_mistake_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        HybridParallelPlugin.from_config(values)
    assert str(error.value) == sentence


def test_several_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigurationError, match="the key 'stages' is not known; .*; sharding_size=0 is not"):
        HybridParallelPlugin.from_config({"mode": "hybrid", "stages": 2, "sharding_size": 0})


def test_the_same_mapping_is_an_option() -> None:
    with pytest.raises(ConfigurationError, match=r"device_mapping has no stage_1; stage_cnt \(pp_size\)=2 needs"):
        HybridParallelPlugin(pp_size=2, device_mapping=ONE)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        (3, MappedDevice(3)),
        ("3", MappedDevice(3)),
        ("cuda:3", MappedDevice(3, "cuda")),
        ("cpu:12", MappedDevice(12, "cpu")),
        ("node-1.local/cuda:0", MappedDevice(0, "cuda", "node-1.local")),
        ("/device:XLA_DTU:38", MappedDevice(38, "xla_dtu")),
        ("cuda", None),
        ("cuda:-1", None),
        (":3", None),
        (-1, None),
        (True, None),
        (None, None),
        (2.0, None),
    ],
)
def test_names_of_devices(name: Any, device: MappedDevice | None) -> None:
    assert MappedDevice.of(name) == device


def test_replicas_follow_the_one_that_is_mapped() -> None:
    assert in_blocks([[1, 0], [3, 2]], 8) == [[[1, 0], [3, 2]], [[5, 4], [7, 6]]]
    assert in_blocks([[5, 0]], 2) == [[[5, 0]]]  # whoever they are, if they are all
    with pytest.raises(ConfigurationError, match=r"places 2 of 4 ranks, \[1, 3\]; .* the ranks 0 to 1, which"):
        in_blocks([[3, 1]], 4)
