"""Choose the layers of a tiny model so that it has one of each kind (windowed, full attention, state space, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INDEXES = ("idx", "indices", "indexes")
_PERIODS = ("period", "interval", "every_n", "pattern", "sparse_step", "layer_step")


def layer_lists(config: Any, num_layers: int | None, wanted: int) -> tuple[int, dict[str, list[Any]]]:
    """Shorten the per-layer lists of a configuration to the layers of the tiny model.

    These are lists with one entry per layer and lists of layer indices. Every combination of entries that a layer has
    is kept, so the tiny model may have more layers than `wanted`.

    Args:
        config: the configuration of the whole model.
        num_layers: its number of layers, if known.
        wanted: minimum number of layers of the tiny model.

    Returns:
        The number of layers, and name -> shortened list.
    """
    fields = {name: value for name, value in config.to_dict().items() if isinstance(value, list | tuple)}
    numbers = {name: value for name, value in fields.items() if _names_layers(name, value, num_layers)}
    lists = {
        name: value
        for name, value in fields.items()
        if name not in numbers and len(value) == num_layers and (num_layers > 4 or "layer" in name)
    }
    if not lists and not numbers:
        return wanted, {}
    entries = [*lists.values(), *([layer in value for layer in range(num_layers)] for value in numbers.values())]
    first_of: dict[str, int] = {}
    for layer in range(num_layers):
        first_of.setdefault(repr([value[layer] for value in entries]), layer)
    kinds = list(first_of.values())
    chosen = [kinds[index % len(kinds)] for index in range(max(wanted, len(kinds)))]
    short = {name: [value[layer] for layer in chosen] for name, value in lists.items()}
    short |= {name: [index for index, layer in enumerate(chosen) if layer in value] for name, value in numbers.items()}
    return len(chosen), short


def _names_layers(name: str, value: list[Any], num_layers: int | None) -> bool:
    """Check whether the list holds layer indices, such as those of the layers with experts."""
    if num_layers is None or not value or not any(word in name for word in ("layer", *_INDEXES)):
        return False
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < num_layers for item in value):
        return False
    return all(before < after for before, after in zip(value, value[1:], strict=False))


def numbers_in_size(name: str, value: Any, num_layers: int) -> list[int] | None:
    """Return the layer indices that a small tower has of a list that exceeds it; None for other values.

    Where it has none of them, they are every second of its layers.
    """
    is_list = isinstance(value, list | tuple) and all(type(each) is int and each >= 0 for each in value)
    if not is_list or not any(word in name for word in _INDEXES) or "out_indices" in name or not value:
        return None
    inside = [each for each in value if each < num_layers]
    return None if len(inside) == len(value) else inside or list(range(1, num_layers, 2))


def short_periods(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Shorten the periods of recurring layer kinds (and their offsets) that exceed `num_layers`."""
    short: dict[str, Any] = {}
    for name, value in fields.items():
        is_period = isinstance(value, int) and any(word in name for word in _PERIODS)
        if is_period and value > num_layers and not name.startswith("_"):
            short[name] = 2
            if (offset := name.replace("_period", "_offset")) != name and offset in fields:
                short[offset] = 1
    return short
