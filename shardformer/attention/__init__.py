"""Attention: which kernel runs, on which heads, and from which random stream."""

from shardformer.attention.backend import log_once
from shardformer.attention.own_attention import route_own_attention
from shardformer.attention.registry import (
    call_kernel,
    recompute_attention,
    use_backend,
    use_sharded_attention,
    uses_registry,
)

__all__ = [
    "call_kernel",
    "log_once",
    "recompute_attention",
    "route_own_attention",
    "use_backend",
    "use_sharded_attention",
    "uses_registry",
]
