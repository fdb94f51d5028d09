"""`auto_accelerate`, which an installed plugin brings."""

from __future__ import annotations

from typing import Any

from booster.extensions import load_extension

ENTRY_POINT_GROUP = "booster.auto_accelerate"


def auto_accelerate(model: Any, *args: Any, **options: Any) -> tuple[bool, Any, Any]:
    """Boost a model by a strategy, or find the fastest layout that fits; see the plugin's own documentation.

    Returns:
        (whether there is one, what was made, the strategy).

    Raises:
        ConfigurationError: no installed plugin brings it, or what it raises.
    """
    return load_extension(ENTRY_POINT_GROUP)(model, *args, **options)
