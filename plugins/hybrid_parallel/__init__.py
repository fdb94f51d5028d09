"""Tensor, sequence, pipeline and data parallelism in one plugin."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.plugin import HybridParallelPlugin

if TYPE_CHECKING:
    from plugins.hybrid_parallel.compat.auto_accelerate import AccelerateResult, auto_accelerate
    from plugins.hybrid_parallel.compat.deepspeed_3d.config import DeepSpeed3DParallelConfig
    from plugins.hybrid_parallel.compat.deepspeed_3d.patches import (
        vocab_parallel_cross_entropy,
        vocab_parallel_logit_helper,
    )
    from plugins.hybrid_parallel.zero.average import ShardedEMA

__all__ = [
    "AccelerateResult",
    "DeepSpeed3DParallelConfig",
    "HybridParallelConfig",
    "HybridParallelPlugin",
    "ShardedEMA",
    "auto_accelerate",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logit_helper",
]

# Imported on demand: the planner and pydantic take longer to import than the plugin, which needs neither.
_ON_DEMAND = {
    "ShardedEMA": "zero.average",
    "AccelerateResult": "compat.auto_accelerate",
    "auto_accelerate": "compat.auto_accelerate",
    "DeepSpeed3DParallelConfig": "compat.deepspeed_3d.config",
    "vocab_parallel_cross_entropy": "compat.deepspeed_3d.patches",
    "vocab_parallel_logit_helper": "compat.deepspeed_3d.patches",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        raise ImportError(f"{name} needs the package pydantic; pip install 'hybrid-booster[atorch]'") from None
