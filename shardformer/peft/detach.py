"""Detaching of adapters while a model is sharded, and reattaching of the sharded adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardformer.peft.kinds import inner_module, is_a, put_inside, wrapped_layers
from shardformer.peft.layer_checks import check_layers
from shardformer.peft.shard import cut_adapter, keep_whole
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import grad_group_of, shard_parameter, spec_of
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.module_paths import has_module, replace_module


@contextmanager
def adapters_aside(model: nn.Module, config: ShardConfig, policy: Policy) -> Iterator[None]:
    """Detach the adapters of `model` inside the context; then reattach those of layers on this stage, sharded.

    Raises:
        ValueError: adapters that cannot be sharded, or options that do not support them; `model` is unchanged then.
    """
    layers = dict(wrapped_layers(model))
    check_layers(layers, config, policy)
    outermost = {path: layer for path, layer in layers.items() if not _is_inside_of_another(path, layers)}
    for path, layer in outermost.items():
        replace_module(model, path, inner_module(layer))
    copies = ModuleCopies(config)
    try:
        yield
    finally:
        for path, layer in outermost.items():
            if has_module(model, path) and not isinstance(model.get_submodule(path), StagePlaceholder):
                put_inside(layer, model.get_submodule(path))
                if is_a(layer, "copied module"):
                    copies.cut(layer)
                elif config.tensor_parallel_size > 1:
                    cut_adapter(layer, path, config)
                keep_whole(layer.parameters(), config)
                replace_module(model, path, layer)


def _is_inside_of_another(path: str, layers: dict[str, nn.Module]) -> bool:
    return any(path.startswith(f"{other}.") for other in layers)


# ----- copies of modules that peft trains in full (modules_to_save) -----


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
