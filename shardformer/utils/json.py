"""Reading of JSON from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LARGEST = 2**28  # bytes; the index of the largest models has a few megabytes


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        ValueError: not a JSON object, or it has a duplicate key, is nested too deeply or is too large; the message
            names the file.
    """
    if path.stat().st_size > _LARGEST:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, more than the {_LARGEST} of any JSON; do not load it"
        )
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be of use; do not load it") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); give a file that is complete") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; give a JSON object")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: readers differ in which value they take, so a file could show one and mean the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' is there twice")
    return found
