"""Parallel layers."""

from shardformer.layers.embedding import (
    GatheredLMHead,
    HeadParallelEmbedding,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    parallel_logits,
)
from shardformer.layers.linear import (
    ColumnParallelLinear,
    MultiQueryLinear,
    RowParallelLinear,
    SharedInput,
    StateSpaceProjection,
)
from shardformer.layers.norm import FusedLayerNorm, FusedRMSNorm, GatedRMSNorm, ParallelDropout
from shardformer.layers.parallel_module import ParallelModule

__all__ = [
    "ColumnParallelLinear",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "GatedRMSNorm",
    "GatheredLMHead",
    "HeadParallelEmbedding",
    "MultiQueryLinear",
    "ParallelDropout",
    "ParallelModule",
    "RowParallelLinear",
    "SharedInput",
    "StateSpaceProjection",
    "VocabParallelEmbedding",
    "VocabParallelLMHead",
    "parallel_logits",
]
