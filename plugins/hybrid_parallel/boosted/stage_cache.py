"""Key/value caches in a pipeline: a stage fills those of its own layers, and counts tokens for all others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from booster.errors import ConfigurationError


class StageCache:
    """One pass of this rank's stages over a cache of transformers.

    Models read from some layer of a cache how many tokens came before; it need not be a layer of theirs. So layers of
    other stages are filled with keys of one element per token. They have the class of the layer: it crops, reorders and
    counts them like its own keys.

    Args:
        cache: a dynamic cache, or transformers' pair of caches of an encoder-decoder; None if there is none.
        size: samples and tokens of this pass.
        device: of the keys.

    Raises:
        ConfigurationError: if it holds something else than keys and values of growing length.
    """

    def __init__(self, cache: Any, size: tuple[int, int], device: torch.device) -> None:
        self.cache = getattr(cache, "self_attention_cache", cache)
        self._before = [] if cache is None else list(self.cache.layers)
        _check(self._before)
        self._keys = torch.ones(size[0], 1, size[1], 1, dtype=torch.bool, device=device)
        self._filled: dict[int, Any] = {}

    def run(self, stage: Callable[[], Any]) -> Any:
        """Run one stage; it sees all layers as they were before this pass, and fills its own."""
        if self.cache is None:
            return stage()
        self.cache.layers[:] = map(copy.copy, self._before)
        result = stage()
        for index, layer in enumerate(self.cache.layers):
            length_before = self._before[index].get_seq_length() if index < len(self._before) else 0
            if layer.get_seq_length() != length_before:
                self._filled[index] = layer
        return result

    def finish(self) -> None:
        """Keep what the stages of this rank have filled; count the tokens of this pass in all other layers."""
        if self.cache is None:
            return
        # A cache without a configuration makes its layers when they are filled.
        layers = [*self._before, *self.cache.layers[len(self._before) :]]
        self.cache.layers[:] = [self._filled.get(index, layer) for index, layer in enumerate(layers)]
        for index, layer in enumerate(self.cache.layers):
            if index not in self._filled:
                layer.update(self._keys, self._keys)


def _check(layers: list[Any]) -> None:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigurationError(
                f"generate() of a pipeline keeps keys and values in caches that grow, and this cache has a "
                f"{type(layer).__name__}; leave out this cache, or cache_implementation, or use use_cache=False"
            )
