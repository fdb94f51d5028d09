"""The sharding engine: parallel layers, policies, the sharder and pipeline stages."""

from shardformer.layers import ParallelModule
from shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardformer.policies.registry import policy_for, register_policy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import ShardSpec, spec_of
from shardformer.sharder import ModelSharder
from shardformer.shardformer import ShardFormer
from shardformer.stage import PipelineStageManager, StageLayout

__all__ = [
    "ModelSharder",
    "ModulePolicyDescription",
    "ParallelModule",
    "PipelineStageManager",
    "Policy",
    "ShardConfig",
    "ShardFormer",
    "ShardSpec",
    "StageLayout",
    "SubModuleReplacementDescription",
    "policy_for",
    "register_policy",
    "spec_of",
]
