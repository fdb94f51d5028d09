"""Key/value caches among the inputs of a model, which releases of transformers name differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of inputs and outputs: since transformers 5.24, before it, and before it in Mamba and its like.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_MODULE = "transformers.cache_utils"


def cache_name(inputs: Mapping[str, Any]) -> str | None:
    """Return the name of the input that is a cache, known by its class, so that a release may rename it; else None.

    What has one of the old names counts whatever it is. An input of a user's own model may be called `cache`.
    """
    return next(
        (name for name, value in inputs.items() if value is not None and (name in CACHE_NAMES[1:] or _is_cache(value))),
        None,
    )


def _is_cache(value: Any) -> bool:
    return any(base.__module__ == _MODULE for base in type(value).__mro__)
