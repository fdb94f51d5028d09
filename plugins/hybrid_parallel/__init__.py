"""Tensor, sequence, pipeline and data parallelism in one plugin."""

from plugins.hybrid_parallel.config import HybridParallelConfig
from plugins.hybrid_parallel.plugin import HybridParallelPlugin

__all__ = ["HybridParallelConfig", "HybridParallelPlugin"]
