"""Tensors as files name and shape them, where a model in memory has them otherwise.

transformers gives many models other modules than those their files were made of: experts in one tensor, vision towers
with new names. Its `save_pretrained` writes the old form, which other programs read. It works on all tensors of a
model at once; here it is asked for a few tensors at a time, and a run without values says beforehand which tensors
depend on one another.
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
    """Tensors that are converted together; most are one tensor that stays as it is.

    Attributes:
        memory: names in memory.
        file: name in files -> dtype and shape.
        keeps_values: the one tensor has at most another name in files.
    """

    memory: tuple[str, ...]
    file: Mapping[str, Form]
    keeps_values: bool


def units_of(model: nn.Module, tensors: Mapping[str, Form]) -> list[Unit]:
    """Which of a model's `tensors` depend on one another in its files, and what they are called there."""
    if not _conversions(model):
        return [Unit((name,), {name: form}, keeps_values=True) for name, form in tensors.items()]
    traced = {name: _Traced.of(name, *form) for name, form in tensors.items()}
    units: dict[str, Unit] = {}  # a name in memory -> the unit that it is in
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
    """The tensors of a unit as files have them."""
    if unit.keeps_values:
        return dict(zip(unit.file, tensors.values(), strict=True))
    return _reverted(model, tensors)


def _reverted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def _conversions(model: nn.Module) -> list[Any]:
    """transformers' transforms from files to memory, those of the files that the model came from if there were any."""
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
    """A tensor without values that knows which tensors it was made of."""

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
