"""Prune a model to one layer of each kind, which is enough to profile every layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardformer.stages.stage import StageLayout

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_SIMPLE = (int, float, str, bool, tuple, type(None))


@dataclass(frozen=True)
class LayerList:
    """List of layers of the whole model.

    Attributes:
        paths: module paths of the list in the whole model. If the sublayers of each layer are in lists of their own,
            the paths of those lists follow.
        kinds: the kind of each layer; the pruned model keeps one layer of each kind, at index `kind`.
    """

    paths: tuple[str, ...]
    kinds: tuple[int, ...]

    @property
    def firsts(self) -> list[int]:
        """Index of the first layer of each kind."""
        return [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]


def layer_lists(model: nn.Module, base_path: str, layout: StageLayout | None) -> list[LayerList]:
    """Find the lists of layers of a model and classify their layers into kinds.

    Two layers are of the same kind if their modules, parameters and settings are equal, except for layer indices. The
    first and the last layer of a list are kinds of their own, because they may change the input or the output.

    Args:
        model: the whole model.
        base_path: path of the base model, to which the paths of `layout` are relative.
        layout: the pipeline structure of the model.

    Returns:
        The lists; empty if `layout` is None.
    """
    base, prefix = model.get_submodule(base_path), f"{base_path}." if base_path else ""
    lists = []
    for each in layout.chain if layout is not None else ():
        paths = (each.layers, *each.sublayer_lists)
        parts = [list(base.get_submodule(path)) for path in paths]
        seen: dict[tuple, int] = {}
        kinds = []
        for position, layers in enumerate(zip(*parts, strict=True)):
            end = position if position in (0, len(parts[0]) - 1) else None
            kinds.append(seen.setdefault((end, *map(_signature, layers)), len(seen)))
        lists.append(LayerList(tuple(prefix + path for path in paths), tuple(kinds)))
    return lists


def prune_layers(model: nn.Module, lists: Sequence[LayerList]) -> None:
    """Remove all but the first layer of each kind, in place."""
    for each in lists:
        for path in each.paths:
            layers = model.get_submodule(path)
            kept = [layers[index] for index in each.firsts]
            layers._modules = {str(place): layer for place, layer in enumerate(kept)}
        _shorten_config(model, len(each.kinds), each.firsts)


def name_in_skeleton(name: str, lists: Sequence[LayerList]) -> str:
    """Return the name of the parameter in the skeleton that corresponds to `name` in the whole model."""
    for each in lists:
        for path in each.paths:
            if name.startswith(f"{path}."):
                number, rest = re.match(r"(\d+)(.*)", name[len(path) + 1 :]).groups()
                return f"{path}.{each.kinds[int(number)]}{rest}"
    return name


def _signature(layer: nn.Module) -> tuple:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((key, tuple(each.shape), each.requires_grad) for key, each in module.named_parameters(recurse=False)),
            tuple(sorted((key, str(value)) for key, value in _settings(module).items())),
        )
        for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> Mapping[str, object]:
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, _SIMPLE)
        and not key.startswith("_")
        and not re.search(r"(layer|block).*(idx|id|index|number)", key)
    }


def _shorten_config(model: nn.Module, count: int, keep: Sequence[int]) -> None:
    """Shorten settings with one entry per layer (such as `layer_types`), and update the numbers of layers."""
    for module in model.modules():
        for key in _COUNTS:
            if vars(module).get(key) == count:
                setattr(module, key, len(keep))
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    for config in configs.values():
        for key, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == count and count > 1:
                setattr(config, key, type(value)(value[index] for index in keep))
            elif key in _COUNTS and value == count:
                setattr(config, key, len(keep))
