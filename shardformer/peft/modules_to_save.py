"""Copies of modules that peft trains whole (`modules_to_save`), cut like the modules that they are copies of."""

from __future__ import annotations

import copy

from torch import nn

from shardformer.layers.linear import copies_groups
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import grad_group_of, shard_parameter, spec_of


class ModuleCopies:
    """Cuts copies of modules.

    Args:
        config: what the modules were sharded by; its process groups are those that they hold.
    """

    def __init__(self, config: ShardConfig) -> None:
        groups = [config.group, config.context_parallel_process_group, config.expert_parallel_process_group]
        # Process groups, and what is asked for, are the same for a copy.
        self._shared = {id(each): each for each in (*groups, *copies_groups(), config, config.sequence)}

    def cut(self, wrapper: nn.Module) -> None:
        """Put copies of the sharded module, with the values of its own, in the place of the whole ones."""
        sharded = wrapper.original_module
        for name, whole in wrapper.modules_to_save.items():
            wrapper.modules_to_save[name] = self._like(sharded, whole)

    def _like(self, sharded: nn.Module, whole: nn.Module) -> nn.Module:
        values, pieces = dict(whole.named_parameters()), dict(sharded.named_parameters())
        new = copy.deepcopy(sharded, self._shared | {id(piece): piece for piece in pieces.values()})
        for name, piece in pieces.items():
            spec, value = spec_of(piece), values[name]
            owner, _, attribute = name.rpartition(".")
            setattr(new.get_submodule(owner), attribute, shard_parameter(value, spec, grad_group_of(piece)))
        for name, buffer in whole.named_buffers():
            new.get_buffer(name).copy_(buffer)
        return new.train(whole.training)
