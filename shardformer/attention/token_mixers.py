"""Token mixers: state spaces, linear attention and short convolutions of hybrid models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from torch import nn

TOKENS = "hidden_states"  # what a mixer calls [batch, seq, hidden]


def token_mixers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of these layers that mix tokens by a convolution of their own, and read `hidden_states`."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    convolve = [each for each in modules if any(isinstance(child, nn.Conv1d) for child in each.children())]
    return [each for each in convolve if TOKENS in inspect.signature(each.forward).parameters]
