"""Recomputation of layers that transformers cannot recompute one by one (ALBERT, MPNet, SwinV2)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardformer.policies.registry import policy_for
from shardformer.utils.caches import CACHE_NAMES
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.module_paths import has_module


class RecomputedLayer(nn.Module):
    """Methods of a layer whose forward runs again in the backward pass (arXiv 1604.06174).

    Attributes:
        gradient_checkpointing: whether the layer is recomputed, by the name that layers of transformers have for it.
        how: keywords of `checkpoint`.
    """

    gradient_checkpointing = True
    how: Mapping[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, and keep nothing of it but its inputs."""
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, **self.how, **kwargs)


def layers_without_recomputation(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the model's lists if transformers cannot recompute them one by one; else none.

    The lists are those that pipeline stages are cut from.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        policy = policy_for(model)
    except ValueError:  # a model without policy has no lists that we know
        return []
    policy.set_model(model)
    base, layout = model.get_submodule(policy.base_path), policy.stages
    lists = [each.layers for each in layout.chain if has_module(base, each.layers)] if layout is not None else []
    layers = [layer for path in lists for layer in base.get_submodule(path)]
    by_transformers = any(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
    # A second run would write the keys and values of a second pass into the cache.
    writes_cache = any(set(CACHE_NAMES) & set(inspect.signature(layer.forward).parameters) for layer in layers)
    return [] if by_transformers or writes_cache else layers


def recompute_layers(model: nn.Module, layers: Sequence[nn.Module], how: Mapping[str, Any]) -> None:
    """Let `layers` of `model` be recomputed, in place; `how` are keywords of `checkpoint`."""
    found = {layer: derive(layer, RecomputedLayer) for layer in layers}
    replace_modules(model, found)
    for layer in found.values():
        layer.how = how
