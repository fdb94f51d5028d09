"""Loading of functions and classes that installed packages register as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from booster.errors import ConfigurationError


def load_extension(group: str, name: str | None = None, wanted: str | None = None) -> Any:
    """Load an object that an installed package registered in an entry point group.

    Args:
        group: entry point group, such as "booster.auto_accelerate".
        name: entry point name; None for the first of the group.
        wanted: what a user asked for, for messages; None for the name.

    Raises:
        ConfigurationError: no installed package registers it.
    """
    found = next(iter(entry_points(group=group) if name is None else entry_points(group=group, name=name)), None)
    if found is None:
        wanted = wanted or name or group.rpartition(".")[2]
        raise ConfigurationError(f"no installed package provides {wanted}; pip install hybrid-booster")
    return found.load()
