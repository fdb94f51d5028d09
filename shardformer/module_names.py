"""Modules that are named by the ends of their paths."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def ends_in(path: str, name: str) -> bool:
    """Whether `path` ends in the whole parts of `name`, of which `*` stands for any number."""
    parts, wanted = path.split("."), name.lstrip(".").split(".")
    if wanted == [""] or len(wanted) > len(parts):
        return False
    found = parts[len(parts) - len(wanted) :]
    return all(part == want or (want == "*" and part.isdecimal()) for part, want in zip(found, wanted, strict=True))


def nearest_names(name: str, paths: Iterable[str]) -> list[str]:
    """Ends of paths that `name` may have meant, the nearest first."""
    return difflib.get_close_matches(name.lstrip("."), _endings(paths), n=3, cutoff=0.0)


def _endings(paths: Iterable[str]) -> list[str]:
    """The last part of each path, and the last two."""
    return sorted({".".join(path.split(".")[-count:]) for path in paths for count in (1, 2)})
