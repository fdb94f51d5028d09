"""Attributes with which a module's forward splits features, and which a rank's share of the features divides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from shardformer.policies.feature_counts import HEADS, names_read
from shardformer.policies.proposed.recording import num_outputs_of
from shardformer.policies.proposed.regions import Region
from shardformer.utils.module_paths import starred

Local = Mapping[str, tuple[str, ...]]
_PARTS = {"fused_colwise": 3, "packed_colwise": 2}


def local_choices(model: nn.Module, region: Region) -> list[Local]:
    """Return the sets of attributes that may have to be divided in a region, the most likely first.

    An attribute is a number of heads, or of features of a column-parallel layer, that the forward of a module around
    the region's layers reads. Which of them stand for a rank's share cannot be known from names: only training tells.

    Returns:
        Choices, each a mapping from path with `*` for numbers to names of attributes.
    """
    sizes = _feature_counts(model, region)
    heads: dict[str, set[str]] = {}
    features: dict[str, set[str]] = {}
    always: dict[str, set[str]] = {}
    for path, module in _owners(model, region):
        numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 1}
        if isinstance(module, nn.modules.conv._ConvNd):
            always[path] = {"groups", "in_channels", "out_channels"}
            continue
        read = names_read(module)
        for name in numbers.keys() & read:
            if HEADS.fullmatch(name) and any(size % numbers[name] == 0 for size in sizes) and numbers[name] % 2 == 0:
                heads.setdefault(path, set()).add(name)
            elif numbers[name] in sizes:
                features.setdefault(path, set()).add(name)
    # Few attributes first: a number may equal that of features by chance, and must then stay.
    single = [{path: {name}} for path, names in sorted(features.items()) for name in sorted(names)]
    choices: list[Local] = []
    for parts in ((heads,), *((heads, one) for one in single), (heads, features), (), *((one,) for one in single)):
        local = _joined(*parts, always)
        if local not in choices:
            choices.append(local)
    return choices


def _joined(*parts: Mapping[str, set[str]]) -> Local:
    found: dict[str, set[str]] = {}
    for part in parts:
        for path, names in part.items():
            found[path] = found.get(path, set()) | names
    return {path: tuple(sorted(names)) for path, names in sorted(found.items())}


def _feature_counts(model: nn.Module, region: Region) -> set[int]:
    """Return the features of the region's columns, and those of each part of a fused one."""
    found = {num_outputs_of(model, path) for path in _paths(model, region.columns)}
    styles = {path: region.styles[starred(path)] for path in _paths(model, region.columns)}
    return found | {num_outputs_of(model, path) // _PARTS.get(style, 1) for path, style in styles.items()}


def _owners(model: nn.Module, region: Region) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules around the layers of a region, one for each path with `*`, up to the layers' closest ancestor.

    The convolutions whose weights are cut, and children without parameters, are among them.
    """
    linears = sorted(region.columns | region.rows)
    split = [path.split(".") for path in linears]
    depth = next(
        (at for at, parts in enumerate(zip(*split, strict=False)) if len(set(parts)) > 1), min(map(len, split)) - 1
    )
    owners = {".".join(parts[:end]) for parts in split for end in range(depth, len(parts))}
    owners |= {path.rpartition(".")[0] for path, style in region.styles.items() if style == "first_dim"}
    seen = set()
    for path, module in model.named_modules():
        name = starred(path)
        is_core = name.rpartition(".")[0] in owners and not any(True for _ in module.parameters())
        if (name in owners or is_core) and name not in seen:
            seen.add(name)
            yield name, module


def _paths(model: nn.Module, patterns: set[str]) -> list[str]:
    return [path for path, _ in model.named_modules() if starred(path) in patterns]
