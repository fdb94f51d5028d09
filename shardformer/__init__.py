"""The sharding engine: parallel layers, policies, the sharder and pipeline stages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardformer.distributed.atorch import MultiDimParallelRandomizer as MultiDimParallelRandomizer
    from shardformer.distributed.atorch import ParallelGroups as ParallelGroups
    from shardformer.distributed.atorch import Randomizer as Randomizer
    from shardformer.distributed.atorch import create_parallel_group as create_parallel_group
    from shardformer.distributed.atorch import destroy_parallel_group as destroy_parallel_group
    from shardformer.distributed.atorch import get_randomizer as get_randomizer
    from shardformer.distributed.atorch import init_randomizer as init_randomizer
    from shardformer.distributed.atorch import parallel_group as parallel_group
    from shardformer.distributed.atorch import parallel_group_size as parallel_group_size
    from shardformer.distributed.atorch import parallel_rank as parallel_rank
    from shardformer.layers import ParallelModule as ParallelModule
    from shardformer.lazy import LazyInitContext as LazyInitContext
    from shardformer.lazy import record_module_init as record_module_init
    from shardformer.policies.backbone import BackbonePolicy as BackbonePolicy
    from shardformer.policies.base import ModulePolicyDescription as ModulePolicyDescription
    from shardformer.policies.base import Policy as Policy
    from shardformer.policies.base import SubModuleReplacementDescription as SubModuleReplacementDescription
    from shardformer.policies.registry import policy_for as policy_for
    from shardformer.policies.registry import register_policy as register_policy
    from shardformer.policies.user_forms import Argument as Argument
    from shardformer.policies.user_forms import Col_Layer as Col_Layer
    from shardformer.policies.user_forms import Layer as Layer
    from shardformer.policies.user_forms import Row_Layer as Row_Layer
    from shardformer.policies.user_forms import SlotPolicy as SlotPolicy
    from shardformer.policies.user_forms import TPInfo as TPInfo
    from shardformer.shard_config import ShardConfig as ShardConfig
    from shardformer.shard_spec import ShardSpec as ShardSpec
    from shardformer.shard_spec import spec_of as spec_of
    from shardformer.shardformer import ModelSharder as ModelSharder
    from shardformer.shardformer import ShardFormer as ShardFormer
    from shardformer.shardformer import ShardModel as ShardModel
    from shardformer.stages.stage import PipelineStageManager as PipelineStageManager
    from shardformer.stages.stage import StageLayout as StageLayout

# Module -> what it exports. Imported on demand: to read a spec takes none of the policies.
_EXPORTS = {
    "distributed.atorch": (
        "MultiDimParallelRandomizer ParallelGroups Randomizer create_parallel_group destroy_parallel_group "
        "get_randomizer init_randomizer parallel_group parallel_group_size parallel_rank"
    ),
    "layers": "ParallelModule",
    "lazy": "LazyInitContext record_module_init",
    "policies.backbone": "BackbonePolicy",
    "policies.base": "ModulePolicyDescription Policy SubModuleReplacementDescription",
    "policies.registry": "policy_for register_policy",
    "policies.user_forms": "Argument Col_Layer Layer Row_Layer SlotPolicy TPInfo",
    "shard_config": "ShardConfig",
    "shard_spec": "ShardSpec spec_of",
    "shardformer": "ModelSharder ShardFormer ShardModel",
    "stages.stage": "PipelineStageManager StageLayout",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
