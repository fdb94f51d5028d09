"""WholeModel: what a boosted model remembers of the model that it is a part of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plugins.hybrid_parallel.boosted.facade import size_asked_of
from shardformer.peft.file_names import FileNames, file_names
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
    """

    config: Any
    names: frozenset[str]
    aliases: Mapping[str, tuple[str, ...]]
    listed_as: Mapping[str, str]
    adapter_names: Mapping[str, FileNames] = field(default_factory=dict)
    sizes: Mapping[tuple[bool, bool], int] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> WholeModel:
        """Describe a model that is not sharded yet."""
        tied = tied_names(model)
        aliases = {name: tuple(other for other in names if other != name) for names in tied for name in names}
        listed_as = {name: names[0] for names in tied for name in names}
        config = copy.deepcopy(getattr(model, "config", None))
        names = frozenset(model.state_dict(keep_vars=True))
        return WholeModel(config, names, aliases, listed_as, file_names(model), size_asked_of(model))
