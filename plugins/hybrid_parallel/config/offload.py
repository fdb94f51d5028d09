"""Options of what a rank keeps outside of its device: in the memory of the machine, or in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from plugins.hybrid_parallel.config.option_group import OptionGroup, Rule, option

CPU = "cpu"
_PLACE = Rule(
    (
        (lambda value: isinstance(value, str | os.PathLike), "is no place; use 'cpu', or a directory"),
        (lambda value: bool(str(value).strip()), "is no place; use 'cpu', or a directory"),
    ),
    CPU,
)


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(OptionGroup):
    """Where states are between their uses: `"cpu"` for the memory of the machine, or a directory.

    In a directory every rank has a file without a name, which is gone with its process. On a CPU `"cpu"` changes
    nothing.

    Attributes:
        offload_optimizer: place of optimizer states, master weights and reduced gradients; the step runs there.
        offload_parameters: place of the shards of parameters; needs `zero_stage=3`.
        offload_activations: place of what layers save for the backward pass.
    """

    offload_optimizer: str | Path | None = option(None, _PLACE)
    offload_parameters: str | Path | None = option(None, _PLACE)
    offload_activations: str | Path | None = option(None, _PLACE)


def directory_of(place: str | Path | None) -> Path | None:
    """Return the directory that an option names; None for the memory of the machine, and for no offload."""
    return None if place is None or place == CPU else Path(place)
