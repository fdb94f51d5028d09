"""Tensor, sequence, pipeline and data parallelism in one plugin."""

from plugins.hybrid_parallel.auto.accelerate import AccelerateResult, auto_accelerate
from plugins.hybrid_parallel.config import HybridParallelConfig
from plugins.hybrid_parallel.plugin import HybridParallelPlugin
from plugins.hybrid_parallel.three_d.config import DeepSpeed3DParallelConfig
from plugins.hybrid_parallel.three_d.logits import vocab_parallel_cross_entropy, vocab_parallel_logit_helper

__all__ = [
    "AccelerateResult",
    "DeepSpeed3DParallelConfig",
    "HybridParallelConfig",
    "HybridParallelPlugin",
    "auto_accelerate",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logit_helper",
]
