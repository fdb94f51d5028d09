"""`auto_accelerate`, implemented by an installed plugin."""

from __future__ import annotations

from typing import Any

from booster.extensions import load_extension

ENTRY_POINT_GROUP = "booster.auto_accelerate"


def auto_accelerate(model: Any, *args: Any, **options: Any) -> tuple[bool, Any, Any]:
    """Boost a model with a strategy, or find the fastest layout that fits; see the plugin's documentation.

    Returns:
        (whether a strategy was found, the result, the strategy); the last two are None if none was found.

    Raises:
        ConfigurationError: no installed plugin registers it, or the plugin raised it.
    """
    return load_extension(ENTRY_POINT_GROUP)(model, *args, **options)
