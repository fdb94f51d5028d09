"""Copies of modules that peft trains in full (`modules_to_save`), sharded like the original modules."""

from __future__ import annotations

import copy

from torch import nn

from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import grad_group_of, shard_parameter, spec_of


class ModuleCopies:
    """Shards copies of modules.

    Args:
        config: configuration that sharded the modules; they refer to its process groups.
    """

    def __init__(self, config: ShardConfig) -> None:
        groups = [config.group, config.context_parallel_process_group, config.expert_parallel_process_group]
        # Objects that a copy shares with its original instead of deep-copying them: process groups and configuration.
        self._shared = {id(each): each for each in (*groups, config, config.sequence)}

    def cut(self, wrapper: nn.Module) -> None:
        """Replace the whole copies by copies of the sharded module that have their own values."""
        sharded = wrapper.original_module
        for name, whole in wrapper.modules_to_save.items():
            wrapper.modules_to_save[name] = self._like(sharded, whole)

    def _like(self, sharded: nn.Module, whole: nn.Module) -> nn.Module:
        values, pieces = dict(whole.named_parameters()), dict(sharded.named_parameters())
        shared = {id(each): each for piece in pieces.values() for each in (piece, grad_group_of(piece))}
        new = copy.deepcopy(sharded, self._shared | shared)
        for name, piece in pieces.items():
            spec, value = spec_of(piece), values[name]
            owner, _, attribute = name.rpartition(".")
            setattr(new.get_submodule(owner), attribute, shard_parameter(value, spec, grad_group_of(piece)))
        for name, buffer in whole.named_buffers():
            new.get_buffer(name).copy_(buffer)
        return new.train(whole.training)
