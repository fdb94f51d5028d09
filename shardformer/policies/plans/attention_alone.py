"""Whether attention is the only operation of layers that mixes tokens, so that a layer can process some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from shardformer.attention.sinks import PARAMETER
from shardformer.attention.token_mixers import token_mixers
from shardformer.policies.feature_counts import attends


def attention_alone_mixes(layers: Iterable[nn.Module]) -> bool:
    """Return whether attention alone mixes tokens in these layers, judged by their modules; False if there are none."""
    layers = list(layers)
    is_everywhere = all(any(map(attends, layer.modules())) for layer in layers)
    return bool(layers) and is_everywhere and not _other_mixers(layers, known=[])


def attention_and_mixers_mix(layers: Iterable[nn.Module]) -> bool:
    """Return whether attention and `token_mixers` alone mix tokens in the layers of a hybrid model."""
    layers = list(layers)
    mixers = token_mixers(layers)
    attentions = [module for layer in layers for module in layer.modules() if attends(module)]
    return bool(mixers and attentions) and not _other_mixers(layers, mixers)


def _other_mixers(layers: Sequence[nn.Module], known: Sequence[nn.Module]) -> list[nn.Module]:
    """Return what may mix tokens outside of attention and of the `known` modules."""
    inside = {each for module in known for each in module.modules()}
    modules = [each for layer in layers for each in layer.modules() if each not in inside]
    attentions = [each for each in modules if attends(each)]
    # A nested module inside attention may select tokens by itself (an indexer).
    parts = [child for module in attentions for child in module.children()]
    selecting = [part for part in parts if any(True for child in part.children() for _ in child.parameters())]
    owners = [module for module in attentions if not module._parameters.keys() <= {PARAMETER}]
    return [*(each for each in modules if isinstance(each, nn.Conv1d)), *selecting, *owners]


def attention_outside(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the attentions of a model that are outside of these layers."""
    held = {module for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if attends(module) and module not in held]


def towers_share_configs(model: nn.Module, layers: Iterable[nn.Module]) -> bool:
    """Return whether attention outside of the layers has their configuration, which names the kernel."""
    layers = list(layers)
    named = {id(module.config) for layer in layers for module in layer.modules() if hasattr(module, "config")}
    return any(id(getattr(module, "config", None)) in named for module in attention_outside(model, layers))
