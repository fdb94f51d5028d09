"""Which installed packages a script imports, found without running it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

_OURS = ("booster", "plugins", "shardformer")


def imports_of(script: Path) -> list[str]:
    """Return what a script imports from installed packages and from this one, as `module` or `module:name`.

    Modules next to the script are left out: importing them may do what is meant for each rank.
    """
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []  # running it will say what is wrong
    return [name for name in _imports(tree) if _is_installed(name.partition(":")[0].partition(".")[0])]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{each.name}" for each in node.names if each.name != "*")


def _is_installed(package: str) -> bool:
    if package in _OURS:
        return True
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and "site-packages" in (found.origin or "")
