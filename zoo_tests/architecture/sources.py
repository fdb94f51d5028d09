"""Sources of the repository as syntax trees, each parsed once a process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = ("shardformer", "booster", "plugins/hybrid_parallel", "hybrid_booster")


def files_of(*packages: str) -> list[Path]:
    """Python files of folders of the repository, in order."""
    return sorted(path for package in packages for path in (REPOSITORY / package).rglob("*.py"))


def named(path: Path) -> str:
    """Path of a file from the repository's root."""
    return str(path.relative_to(REPOSITORY))


@cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file, which nobody may change.

    A tree has no circles to look for: with the collector at work, parsing takes four times as long, and each later
    collection looks at a million nodes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    gc.freeze()
    if was_enabled:
        gc.enable()
    return tree
