"""Parallel layers."""

from shardformer.layers.embedding import HeadParallelEmbedding, VocabParallelEmbedding
from shardformer.layers.linear import ColumnParallelLinear, MultiQueryLinear, RowParallelLinear, SharedInput
from shardformer.layers.lm_head import GatheredLMHead, VocabParallelLMHead, parallel_logits
from shardformer.layers.norm import FusedLayerNorm, FusedRMSNorm, ParallelDropout
from shardformer.layers.parallel_module import ParallelModule
from shardformer.layers.state_space import GatedRMSNorm, StateSpaceProjection

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
