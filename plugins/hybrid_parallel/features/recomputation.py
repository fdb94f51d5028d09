"""Recomputation of layers in the backward pass, and of feed-forwards in tiles."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.features.feature import Feature, Parts
from shardformer.attention import recompute_attention, uses_registry
from shardformer.distributed.sequence_parallel import SequenceParallel
from shardformer.policies.registry import policy_for
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.module_paths import CACHE_NAMES, has_module
from shardformer.utils.source import computes_tokens
from shardformer.utils.untraced import contexts_by_operators


class RecomputedLayer(nn.Module):
    """Methods of a layer whose forward runs again in the backward pass (arXiv 1604.06174).

    Attributes:
        gradient_checkpointing: whether the layer is recomputed, by the name that layers of transformers have for it.
    """

    gradient_checkpointing = True
    how: Mapping[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, and keep nothing of it but its inputs."""
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, **self.how, **kwargs)


def layers_without_recomputation(model: nn.Module) -> list[nn.Module]:
    """Return the layers that stages are cut from, if transformers cannot recompute them one by one; else none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        policy = policy_for(model)
    except ValueError:  # a model without policy has no lists that we know
        return []
    policy.set_model(model)
    lists = [path for path in policy.layer_lists if has_module(model, path)]
    layers = [layer for path in lists for layer in model.get_submodule(path)]
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


# Packages of modules that compute each token by itself: layers of ours stand for those of transformers.
_OF_TOKENS = ("torch.nn.modules.", "transformers.activations", "transformers.pytorch_utils", "bitsandbytes.", "peft.")
_OF_TOKENS += ("shardformer.",)
_NOT_OF_TOKENS = ("MultiheadAttention", "Softmax", "BatchNorm", "GroupNorm", "InstanceNorm", "Pool", "RNN")


class TiledFeedForward(nn.Module):
    """Methods of a feed-forward that runs in tiles, hooks included: in theirs, ranks gather a sequence."""

    # the sequence-parallel region whose tokens its hooks gather; None if it has whole sequences
    region: SequenceParallel | None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute [..., tokens, hidden] -> [..., tokens, hidden], in tiles of about `hidden` tokens of all sequences.

        The inner tensors of a tile are then about as large as the weights. Tensor-parallel ranks have as many tokens,
        and so as many tiles.
        """
        (x,) = (*args, *kwargs.values())
        rows = max(1, x.shape[-1] // max(1, x.shape[:-2].numel()))
        if x.dim() < 2 or x.shape[-2] <= rows:
            return super().__call__(x)
        tiles = x.split(rows, dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([self._tile(tile) for tile in tiles], dim=-2)
        return torch.cat([checkpoint(self._tile, tile, use_reentrant=False) for tile in tiles], dim=-2)

    def _tile(self, x: Tensor) -> Tensor:
        with _length_of_tile(self.region, x.shape[-2]):
            return super().__call__(x)


@contextmanager
def _length_of_tile(region: SequenceParallel | None, rows: int) -> Iterator[None]:
    """Let a region gather and scatter sequences of which each rank has `rows` tokens.

    Padding at the end of a sequence is computed too; nothing reads the results, and their gradients are zero.
    """
    if region is None:
        yield
        return
    length, region.length = region.length, rows * region.world_size
    try:
        yield
    finally:
        region.length = length


def is_feed_forward(module: nn.Module) -> bool:
    """Return whether a module widens tokens by linear layers, and computes each of them by itself."""
    children = list(module.children())
    dims = [each.dim() for child in children for each in child.parameters()]
    return dims.count(2) > 1 and max(dims) == 2 and all(map(_is_of_tokens, children)) and computes_tokens(type(module))


def _is_of_tokens(child: nn.Module) -> bool:
    kinds = [type(each) for each in child.modules() if not isinstance(each, StagePlaceholder)]
    return all(
        kind.__module__.startswith(_OF_TOKENS) and not any(name in kind.__name__ for name in _NOT_OF_TOKENS)
        for kind in kinds
    )


def tile_feed_forwards(model: nn.Module) -> int:
    """Run feed-forwards in tiles but where a module around gathers the tokens; return their number."""
    tiled = {}
    for module in model.modules():
        if "forward" in vars(module) or not is_feed_forward(module):
            continue
        scattered = {each.sequence for each in module.modules() if getattr(each, "sequence", None) is not None}
        gathered = {each.gathered for each in module.modules() if getattr(each, "gathered", None) is not None}
        if scattered == gathered:
            module.region = next(iter(gathered), None)
            tiled[module] = derive(module, TiledFeedForward)
    replace_modules(model, tiled)
    return len(tiled)


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
