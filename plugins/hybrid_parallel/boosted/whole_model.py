"""WholeModel: what a boosted model remembers of the model that it is a part of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plugins.hybrid_parallel.boosted.facade import size_asked_of
from plugins.hybrid_parallel.zero.gradient_hooks import hooked_names
from shardformer.lazy import empty_copy
from shardformer.peft.file_names import FileNames, file_names
from shardformer.quantised import is_quantised
from shardformer.utils.parameter_names import tied_names


@dataclass(frozen=True)
class WholeModel:
    """Description of a model before it was sharded.

    Attributes:
        config: its configuration; None if it is not a transformers model.
        names: names of its parameters and persistent buffers.
        aliases: name -> the other names of the same (tied) parameter.
        listed_as: name of a tied parameter -> the name under which `named_parameters` lists it.
        adapter_names: peft adapter -> names of its tensors here -> names in its file.
        sizes: (only trainable, without embeddings) -> number of parameters.
        modules: the whole model without values; the reason where it has none.
    """

    config: Any
    names: frozenset[str]
    aliases: Mapping[str, tuple[str, ...]]
    listed_as: Mapping[str, str]
    adapter_names: Mapping[str, FileNames] = field(default_factory=dict)
    sizes: Mapping[tuple[bool, bool], int] = field(default_factory=dict)
    modules: nn.Module | str = "it was not boosted"

    @staticmethod
    def of(model: nn.Module) -> WholeModel:
        """Describe a model that is not sharded yet."""
        tied = tied_names(model)
        aliases = {name: tuple(other for other in names if other != name) for names in tied for name in names}
        listed_as = {name: names[0] for names in tied for name in names}
        config = copy.deepcopy(getattr(model, "config", None))
        names = frozenset(model.state_dict(keep_vars=True))
        modules = _modules_of(model)
        return WholeModel(config, names, aliases, listed_as, file_names(model), size_asked_of(model), modules)


def _modules_of(model: nn.Module) -> nn.Module | str:
    """Return the modules of a model without values, or why another layout could not be built from them."""
    if any(map(is_quantised, model.parameters())):
        return "its weights are quantised"
    if names := hooked_names(model):
        return f"{names[0]} has a hook on its gradient"
    try:
        return empty_copy(model)
    except Exception as error:  # a user's module may hold anything
        return f"its modules cannot be copied ({type(error).__name__}: {error})"
