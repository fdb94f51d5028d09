"""Options of recomputation: which layers run again in the backward pass, and feed-forwards in tiles that do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.features.feature import Feature, Parts
from shardformer.attention import recompute_attention, uses_registry
from shardformer.transforms.recomputed_layers import (
    RecomputedLayer,
    is_feed_forward,
    layers_without_recomputation,
    recompute_layers,
    tile_feed_forwards,
)
from shardformer.utils.untraced import contexts_by_operators

_SWITCH = "gradient_checkpointing_enable"


class Recomputation(Feature):
    """Recomputes the attention, layers, or operators of layers."""

    def __init__(self, config: HybridParallelConfig) -> None:
        super().__init__(config)
        self._wanted, self._is_on = config.kernels.gradient_checkpointing, False

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse a model that is not of transformers, or whose layers or attention cannot be reached."""
        name, wanted = type(model).__name__, self._wanted
        if not any(hasattr(module, _SWITCH) for module in model.modules()):
            raise ConfigurationError(
                f"gradient_checkpointing={wanted!r} needs a transformers model, not a {name}; "
                "use gradient_checkpointing=None"
            )
        if wanted != "selective" and not _recomputed_models(model):
            raise ConfigurationError(
                f"gradient_checkpointing={wanted!r} recomputes layers, which transformers cannot for {name}; "
                "use gradient_checkpointing=None"
            )
        if wanted == "selective" and not any(map(uses_registry, model.modules())):
            raise ConfigurationError(
                f"gradient_checkpointing='selective' cannot reach the attention of {name}, which is written out in its "
                "modules; use 'full'"
            )

    def prepare(self, model: nn.Module) -> None:
        """Turn on recomputation of the attention, or of all layers or their operators."""
        self._is_on = True
        if self._wanted == "selective":
            recompute_attention(model)
            return
        how = {"use_reentrant": False}
        if self._wanted == "operators":
            how["context_fn"] = contexts_by_operators
        for each in _recomputed_models(model):
            if layers := layers_without_recomputation(each):
                recompute_layers(each, layers, how)
            else:
                _recompute_by_transformers(each, how)

    def sharded(self, parts: Parts) -> None:
        """Recompute only the first share of this stage's layers: in a pipeline they wait longest for their backward."""
        if not self._is_on or not isinstance(self._wanted, float):
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        kinds = (GradientCheckpointingLayer, RecomputedLayer)
        layers = [module for module in parts.module.modules() if isinstance(module, kinds)]
        if not layers:
            raise ConfigurationError(
                f"gradient_checkpointing={self._wanted} finds no layers to choose from in "
                f"{type(parts.module).__name__}; use 'full'"
            )
        for layer in layers[math.ceil(self._wanted * len(layers)) :]:
            layer.gradient_checkpointing = False


class TiledFeedForwards(Feature):
    """Computes feed-forwards in tiles of tokens."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse a model without a feed-forward whose code shows that it computes each token by itself."""
        if not any(map(is_feed_forward, model.modules())):
            raise ConfigurationError(
                f"tiled_mlp=True finds no feed-forward of {type(model).__name__} that computes each token by itself; "
                "use tiled_mlp=False"
            )

    def sharded(self, parts: Parts) -> None:
        """Run the feed-forwards of this rank in tiles."""
        tile_feed_forwards(parts.module)


def _recomputed_models(model: nn.Module) -> list[nn.Module]:
    """Return the model if its layers can be recomputed; else the models with such layers inside of it."""
    if hasattr(model, _SWITCH) and (
        getattr(model, "supports_gradient_checkpointing", True) or layers_without_recomputation(model)
    ):
        return [model]
    return [found for child in model.children() for found in _recomputed_models(child)]


def _recompute_by_transformers(model: nn.Module, how: dict[str, Any]) -> None:
    """Turn on recomputation by transformers' own switch, which has another name in newer releases."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
