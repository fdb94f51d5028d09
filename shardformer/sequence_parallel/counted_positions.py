"""Positions that a module counts from 0 by the length of its input, of which a rank has a part.

Llama 4 scales queries by the logarithm of their positions (arXiv 2501.19399), which its attention counts by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.forward_syntax import counts_positions
from shardformer.utils.source import with_globals

# (tokens of a part, device) -> [part], the positions of this rank's tokens in whole sequences
PositionsOfPart = Callable[[int, "torch.device | str | None"], Tensor]


def count_whole_sequences(model: nn.Module, layers: Iterable[nn.Module], positions: PositionsOfPart) -> None:
    """Let modules of `layers` that count the positions of their input count those of whole sequences."""
    modules = dict.fromkeys(each for layer in layers for each in layer.modules())
    counting = [module for module in modules if counts_positions(type(module))]
    methods = {cls: _methods_of(cls, positions) for cls in {type(module) for module in counting}}
    replace_modules(model, {module: derive(module, methods[type(module)]) for module in counting})


def _methods_of(cls: type[nn.Module], positions: PositionsOfPart) -> type[nn.Module]:
    forward = with_globals(cls.forward, {"torch": _Torch(positions)})
    return type(cls.__name__, (nn.Module,), {"forward": forward})


class _Torch:
    """What a forward reads from `torch`, where `arange` counts the tokens of this rank's part."""

    def __init__(self, positions: PositionsOfPart) -> None:
        self._positions = positions

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def arange(self, length: int, device: torch.device | str | None = None, **options: Any) -> Tensor:
        """Return [part], the positions in whole sequences of a part of `length` tokens."""
        return self._positions(length, device).to(**options)
