"""The sharding engine: parallel layers, policies, the sharder and pipeline stages."""

from shardformer.compat.atorch.parallel_groups import (
    ParallelGroups,
    create_parallel_group,
    destroy_parallel_group,
    parallel_group,
    parallel_group_size,
    parallel_rank,
)
from shardformer.compat.atorch.randomizer import MultiDimParallelRandomizer, Randomizer, get_randomizer, init_randomizer
from shardformer.layers import ParallelModule
from shardformer.lazy import LazyInitContext, record_module_init
from shardformer.policies.backbone import BackbonePolicy
from shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardformer.policies.registry import policy_for, register_policy
from shardformer.policies.user.slots import Argument, Col_Layer, Layer, Row_Layer, SlotPolicy
from shardformer.policies.user.tp_info import TPInfo
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import ShardSpec, spec_of
from shardformer.sharder import ModelSharder
from shardformer.shardformer import ShardFormer, ShardModel
from shardformer.stages.stage import PipelineStageManager, StageLayout

__all__ = [
    "Argument",
    "BackbonePolicy",
    "Col_Layer",
    "Layer",
    "LazyInitContext",
    "ModelSharder",
    "ModulePolicyDescription",
    "MultiDimParallelRandomizer",
    "ParallelGroups",
    "ParallelModule",
    "PipelineStageManager",
    "Policy",
    "Randomizer",
    "Row_Layer",
    "ShardConfig",
    "ShardFormer",
    "ShardModel",
    "ShardSpec",
    "SlotPolicy",
    "StageLayout",
    "SubModuleReplacementDescription",
    "TPInfo",
    "create_parallel_group",
    "destroy_parallel_group",
    "get_randomizer",
    "init_randomizer",
    "parallel_group",
    "parallel_group_size",
    "parallel_rank",
    "policy_for",
    "record_module_init",
    "register_policy",
    "spec_of",
]
