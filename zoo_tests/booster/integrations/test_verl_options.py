"""What verl's configurations say of an engine, in our options; verl itself is not needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from booster.errors import ConfigurationError
from booster.integrations.verl_options import dtype_of, plugin_options
from plugins.hybrid_parallel import HybridParallelPlugin


@dataclass
class Engine:
    """Fields of verl's `EngineConfig` that it gives each engine, and some of engines of its own."""

    strategy: str = "hybrid_booster"
    dtype: str = "bfloat16"
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False
    use_fused_kernels: bool = False
    use_remove_padding: bool = True
    seed: int = 42
    router_replay: Any = field(default_factory=lambda: SimpleNamespace(mode="disabled"))
    tensor_model_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    use_mbridge: bool = True
    plugin: dict[str, Any] = field(default_factory=dict)


def options_of(model: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return plugin_options(Engine(**fields), SimpleNamespace(**(model or {})))


@pytest.mark.parametrize(
    ("fields", "model", "expected"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_parallel_size": 4}, {}, {"tp_size": 2, "pp_size": 4}),
        ({"dtype": "float16"}, {}, {"precision": "fp16"}),
        ({"param_offload": True}, {}, {"zero_stage": 3, "offload_parameters": "cpu"}),
        ({"optimizer_offload": True}, {}, {"offload_optimizer": "cpu", "zero_stage": 1}),
        ({"plugin": {"pp_style": "zero_bubble"}}, {}, {"pp_style": "zero_bubble", "precision": "bf16"}),
        ({}, {"enable_gradient_checkpointing": True}, {"gradient_checkpointing": "full"}),
        ({}, {"enable_activation_offload": True}, {"offload_activations": "cpu"}),
    ],
)
def test_fields_become_options(fields: dict[str, Any], model: dict[str, Any], expected: dict[str, Any]) -> None:
    options = options_of(model, **fields)
    assert expected.items() <= options.items()
    HybridParallelPlugin(**options)  # which refuses options that do not exist


@pytest.mark.parametrize(
    ("fields", "model", "told"),
    [
        ({"use_mbridge": False}, {}, "engine.use_mbridge=False means nothing"),
        ({"use_fused_kernels": True}, {}, "use_fused_kernels=False"),
        ({"router_replay": SimpleNamespace(mode="R3")}, {}, "engine.router_replay.mode='R3'"),
        ({"dtype": "int8"}, {}, "engine.dtype='int8'"),
        ({"param_offload": True, "forward_only": True}, {}, "use param_offload=False"),
        ({}, {"use_liger": True}, "enable_fused_normalization=True"),
    ],
)
def test_what_means_nothing_is_refused(fields: dict[str, Any], model: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        options_of(model, **fields)


def test_dtypes_have_the_names_of_both_libraries() -> None:
    assert {dtype_of("fp32"), dtype_of("float32")} == {torch.float32}
    with pytest.raises(ConfigurationError, match="model_dtype='int8' is none of fp64"):
        dtype_of("int8")
