"""Conversion of tensors from their layout in memory to their layout in files.

For many models, transformers uses modules that differ from those in the checkpoint files: experts fused into one
tensor, vision towers with new names. Its `save_pretrained` writes the original layout, which other programs read, but
converts all tensors of a model at once. This module converts a few tensors at a time. A dry run on the meta device
first finds which tensors depend on one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Unit:
    """A group of tensors that are converted together; most groups are one tensor that needs no conversion."""

    memory: tuple[str, ...]  # names in memory
    file: Mapping[str, Form]  # name in files -> (dtype, shape)
    keeps_values: bool  # the group is a single tensor that is at most renamed


def units_of(model: nn.Module, tensors: Mapping[str, Form]) -> list[Unit]:
    """Group a model's `tensors` by their dependencies in the conversion, and find their names in files."""
    if not _conversions(model):
        return [Unit((name,), {name: form}, keeps_values=True) for name, form in tensors.items()]
    traced = {name: _Traced.of(name, *form) for name, form in tensors.items()}
    units: dict[str, Unit] = {}  # name in memory -> its unit
    for name, value in _reverted(model, traced).items():
        parts = [units[source] for source in sorted(value.sources) if source in units]
        memory = sorted(value.sources.union(*(part.memory for part in parts)))
        file = {name: (value.dtype, tuple(value.shape))}
        for part in parts:
            file |= part.file
        unit = Unit(tuple(memory), file, keeps_values=any(value is each for each in traced.values()))
        units.update(dict.fromkeys(memory, unit))
    return list({id(unit): unit for unit in units.values()}.values())


def to_files(model: nn.Module, unit: Unit, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a unit to their layout in files."""
    if unit.keeps_values:
        return dict(zip(unit.file, tensors.values(), strict=True))
    return _reverted(model, tensors)


def _reverted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def _conversions(model: nn.Module) -> list[Any]:
    """Return transformers' file-to-memory transforms, preferring those used when the model was loaded."""
    if not hasattr(model, "config"):
        return []
    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return known
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in transforms if not isinstance(each, PrefixChange)]


class _Traced(Tensor):
    """A meta tensor that records which tensors it was computed from."""

    sources: frozenset[str]

    @staticmethod
    def of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _Traced:
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Traced)
        tensor.sources = frozenset([name])
        return tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Traced)]
        sources = frozenset().union(*(getattr(each, "sources", ()) for each in given))
        for each in tree_leaves(result):
            if isinstance(each, _Traced) and not hasattr(each, "sources"):
                each.sources = sources
        return result
