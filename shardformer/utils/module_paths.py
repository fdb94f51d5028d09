"""Modules that are named by their paths, or by the ends of these."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn


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


def starred(path: str) -> str:
    """A path with `*` in the place of numbers: what a plan calls a module of every layer."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def told(model: nn.Module, paths: Iterable[str]) -> str:
    """Modules of a model in words: those of several layers once, "layers.*.norm (a LayerNorm), head (a Linear)"."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(starred(path), []).append(path)
    return ", ".join(
        f"{same[0] if len(same) == 1 else path} (a {type(model.get_submodule(same[0])).__name__})"
        for path, same in alike.items()
    )
