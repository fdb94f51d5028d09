"""Dictionaries that layers write for later layers, such as the keys and values that several layers share.

A stage adds what earlier stages wrote to the dictionary of its own pass. A dictionary has known keys; each value is a
pair of tensors. See `StageLayout.shared_states`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from torch import Tensor

Name = str | int  # of an entry of a dictionary: a kind of layers, or the number of a layer
States = Mapping[str, Sequence[Name]]
Key = tuple[str, str]


def state_keys(states: States) -> list[Key]:
    """Return the names of all tensors of the dictionaries in the order of a message: (input, key and part)."""
    return [(name, f"{key}.{part}") for name, keys in states.items() for key in keys for part in (0, 1)]


def written(states: States, inputs: Mapping[str, Mapping[Name, tuple[Tensor, Tensor]]]) -> dict[Key, Tensor]:
    """Return the tensors that the dictionaries `inputs` hold so far."""
    return {
        (name, f"{key}.{part}"): tensor
        for name, keys in states.items()
        for key in keys
        if key in inputs[name]
        for part, tensor in enumerate(inputs[name][key])
    }


def add_received(
    states: States,
    inputs: Mapping[str, MutableMapping[Name, tuple[Tensor, Tensor]]],
    kept: Mapping[Key, Tensor | None],
) -> None:
    """Add the received tensors to the dictionaries `inputs`, in place: all later layers read the same objects."""
    for name, keys in states.items():
        for key in keys:
            first, second = (kept.get((name, f"{key}.{part}")) for part in (0, 1))
            if first is not None and second is not None:
                inputs[name][key] = (first, second)
