"""Parallelization strategies, given as JSON or as the list of named methods that ATorch's `auto_accelerate` takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.compat.deepspeed_3d.config import DeepSpeed3DParallelConfig
from plugins.hybrid_parallel.plugin import HybridParallelPlugin

Strategy = str | Path | Mapping[str, Any] | Sequence[Any]

_AXES = {"tensor": "tp_size", "data": "dp_size", "pipeline": "pp_size", "pipe": "pp_size"}
_PRECISIONS = {"float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
_OF_THE_WHOLE = ("parallel_mode", "deepspeed_3d_parallel")  # handled by `plugin_of` itself
_NOT_HERE = {
    "fp8": "amp_native",
    "native_dynamo": "module_replace",
    "auto_ddp": "parallel_mode",
}


def plugin_of(strategy: Strategy) -> HybridParallelPlugin:
    """Create the plugin for a strategy.

    Args:
        strategy: input of `HybridParallelPlugin.from_config`, or a list of method names and (name, settings) pairs.

    Raises:
        ConfigurationError: a method is unknown or not available, or its settings are invalid.
    """
    if isinstance(strategy, str | Path | Mapping):
        return HybridParallelPlugin.from_config(dict(strategy) if isinstance(strategy, Mapping) else strategy)
    options: dict[str, Any] = {}
    groups, three_d = None, None
    for each in strategy:
        name, settings = (each, None) if isinstance(each, str) else _pair(each)
        if name == "parallel_mode":
            groups = settings
        elif name in ("deepspeed_3d_parallel", "ds_3d_parallel"):
            three_d = settings if settings is not None else DeepSpeed3DParallelConfig()
        else:
            options |= _options_of(name, settings)
    if three_d is not None:
        if groups is None:
            raise ConfigurationError(
                "deepspeed_3d_parallel also needs parallel_mode; "
                'use ("parallel_mode", ([("tensor", 2), ("data", 1), ("pipeline", 2)], None))'
            )
        return HybridParallelPlugin.from_3d_config(three_d, groups, **options)
    return HybridParallelPlugin(**_sizes(groups), **options)


def _pair(each: Any) -> tuple[str, Any]:
    if not isinstance(each, Sequence) or len(each) != 2 or not isinstance(each[0], str):
        raise ConfigurationError(
            f"{each!r} is no method of a strategy; use a name, or (name, settings), as in "
            '("amp_native", {"dtype": "bf16"})'
        )
    return each[0], each[1]


def _options_of(name: str, settings: Any) -> dict[str, Any]:
    """Return the plugin options of a method."""
    if name in _NOT_HERE:
        raise ConfigurationError(f"the method '{name}' is not available; use '{_NOT_HERE[name]}'")
    if name not in _METHODS:
        near = difflib.get_close_matches(name, [*_METHODS, *_OF_THE_WHOLE], n=1, cutoff=0.0)[0]
        raise ConfigurationError(f"the method '{name}' is not known; use '{near}'")
    return _METHODS[name](name, settings)


def _amp(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for mixed precision; as in ATorch, the default is fp16."""
    settings = _known(name, settings, ("dtype", "skip_if_nonfinite"))
    dtype = str(settings.get("dtype", "fp16")).removeprefix("torch.")
    if dtype not in _PRECISIONS:
        raise ConfigurationError(f"{name} with dtype={dtype!r} is not available; use 'fp16' or 'bf16'")
    skips = {"nonfinite": "skip"} if settings.get("skip_if_nonfinite") else {}
    return {"precision": _PRECISIONS[dtype], **skips}


def _half(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for 16-bit parameters without fp32 master weights."""
    dtype = "fp16" if settings is None else str(settings).removeprefix("torch.")
    if _PRECISIONS.get(dtype) not in ("fp16", "bf16"):
        raise ConfigurationError(f"{name} with {settings!r} is not available; use 'fp16' or 'bf16'")
    return {"precision": _PRECISIONS[dtype], "master_weights": False}


def _zero(stage: int) -> Callable[[str, Any], dict[str, Any]]:
    def options(name: str, settings: Any) -> dict[str, Any]:
        _known(name, settings, ())
        return {"zero_stage": stage}

    return options


def _checkpoint(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for recomputation; ATorch's settings name layer classes, here all layers are recomputed."""
    return {
        "gradient_checkpointing": settings
        if isinstance(settings, float) or settings in ("operators", "selective")
        else "full"
    }


def _module_replace(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for optimized kernels."""
    _known(name, settings, ())
    return {"enable_fused_normalization": True, "enable_flash_attention": True, "enable_jit_fused": True}


def _size(option: str) -> Callable[[str, Any], dict[str, Any]]:
    keys = {"tp_size": "tensor", "pp_size": "pipeline"}

    def read(name: str, settings: Any) -> dict[str, Any]:
        found = _known(name, settings, ("size",)).get("size")
        if not isinstance(found, int):
            raise ConfigurationError(
                f"{name} needs a size; use ({name!r}, {{'size': 2}}), or parallel_mode with a group '{keys[option]}'"
            )
        return {option: found}

    return read


def _sequence(name: str, settings: Any) -> dict[str, Any]:
    _known(name, settings, ())
    return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}


def _mixed(name: str, settings: Any) -> dict[str, Any]:
    """Return the sizes of several axes, given in the form of `parallel_mode`."""
    return _sizes(settings)


_METHODS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "amp_native": _amp,
    "half": _half,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "fsdp": _zero(3),
    "fsdp2": _zero(3),
    "checkpoint": _checkpoint,
    "module_replace": _module_replace,
    "tensor_parallel": _size("tp_size"),
    "pipeline_parallel": _size("pp_size"),
    "sequence_parallel": _sequence,
    "mixed_parallel": _mixed,
}


def _known(name: str, settings: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    settings = {} if settings is None else settings
    unknown = list(settings) if not isinstance(settings, Mapping) else sorted(set(settings) - set(keys))
    if unknown or not isinstance(settings, Mapping):
        allowed = " and ".join(keys) if keys else "no settings"
        raise ConfigurationError(f"{name} has no setting {unknown[0]!r}; use {allowed}")
    return settings


def _sizes(groups: Any) -> dict[str, int]:
    """Parse axis sizes from `([("tensor", t), ("data", d), ("pipeline", p)], None)`."""
    if groups is None:
        return {}
    try:
        axes, order = groups
        sizes = {name: size for name, size in axes}
    except (TypeError, ValueError):
        raise ConfigurationError(
            f'parallel_mode={groups!r} is none; use ([("tensor", 2), ("data", 1), ("pipeline", 2)], None)'
        ) from None
    unknown = sorted(name for name, size in sizes.items() if name not in _AXES and size != 1)
    if unknown:
        raise ConfigurationError(f"parallel_mode has no group '{unknown[0]}'; use tensor, data and pipeline")
    if order is not None:
        raise ConfigurationError(
            "parallel_mode with an order of ranks also needs deepspeed_3d_parallel; use it, or None for the order"
        )
    return {_AXES[name]: size for name, size in sizes.items() if name in _AXES}
