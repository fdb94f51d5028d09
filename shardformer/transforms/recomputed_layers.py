"""Recomputation: of layers that transformers cannot recompute one by one (ALBERT, MPNet, SwinV2), and of feed-forwards.

These run in tiles of tokens (tiled MLP; ALST, arXiv 2506.13996, section 3.1). A feed-forward widens each token to
several times the hidden size, and a long row widens all of its tokens at once. Each token is computed by itself, so one
tile follows the other. The backward pass recomputes a tile just before it needs it: what is between the first and the
last product exists for one tile alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.distributed.sequence_parallel import SequenceParallel
from shardformer.policies.registry import policy_for
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.module_paths import CACHE_NAMES, has_module
from shardformer.utils.source import computes_tokens


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
    """Methods of a feed-forward that runs in tiles, hooks included: in its own, ranks gather the tokens of a sequence.

    Attributes:
        region: the sequence-parallel region whose tokens its hooks gather; None if it has whole sequences.
    """

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
    """Run the feed-forwards of a sharded model in tiles; return their number.

    One whose tokens a module around it gathers stays whole.
    """
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
