"""Whether attention is the only operation of layers that mixes tokens, so that a layer can process some of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardformer.attention.sinks import PARAMETER
from shardformer.policies.feature_counts import attends


def attention_alone_mixes(layers: Iterable[nn.Module]) -> bool:
    """Return whether attention alone mixes tokens in these layers, judged by their modules; False if there are none."""
    layers = list(layers)
    attentions = [[module for module in layer.modules() if attends(module)] for layer in layers]
    others = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Conv1d)]
    # A nested module inside attention may select tokens by itself (an indexer).
    parts = [child for found in attentions for module in found for child in module.children()]
    others += [part for part in parts if any(True for child in part.children() for _ in child.parameters())]
    own = {name for found in attentions for module in found for name in module._parameters}
    return bool(layers) and all(attentions) and not others and own <= {PARAMETER}


def attention_outside(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the attentions of a model that are outside of these layers."""
    held = {module for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if attends(module) and module not in held]


def towers_share_configs(model: nn.Module, layers: Iterable[nn.Module]) -> bool:
    """Return whether attention outside of the layers has their configuration, which names the kernel."""
    layers = list(layers)
    named = {id(module.config) for layer in layers for module in layer.modules() if hasattr(module, "config")}
    return any(id(getattr(module, "config", None)) in named for module in attention_outside(model, layers))
