"""Layering of the library's folders, derived from its imports: `python docs/figures/draw_folders.py`.

The script writes the blocks of docs/architecture.md: each line imports only from lines below it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
PACKAGES = ("plugins/hybrid_parallel", "booster", "shardformer")


def folder_of(module: str, package: str) -> str | None:
    """Return the file or folder of `package` that contains a module: `zero/`, `plugin.py`; None if it is elsewhere."""
    inside = module.removeprefix(package.replace("/", ".") + ".")
    if inside == module:
        return None
    name = inside.partition(".")[0]
    return f"{name}/" if (REPOSITORY / package / name).is_dir() else f"{name}.py"


def imports_of(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports when it is imported: not in functions, nor for type checkers."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph_of(package: str) -> dict[str, set[str]]:
    """Return file or folder at the top of a package -> the files and folders that it imports from."""
    graph: dict[str, set[str]] = {}
    for path in sorted((REPOSITORY / package).rglob("*.py")):
        parts = path.relative_to(REPOSITORY / package).parts
        here = parts[0] if len(parts) == 1 else f"{parts[0]}/"
        if here == "__init__.py":
            continue
        known = {folder_of(target, package) for target in imports_of(path)}
        there = {each for each in known if each is not None and (REPOSITORY / package / each).exists()}
        graph.setdefault(here, set()).update(there - {here})
    return graph


def levels_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sort the graph into levels, lowest first: each level imports only from lower ones.

    Raises:
        ValueError: the imports form a cycle.
    """
    levels: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(graph):
        level = sorted(name for name, needed in graph.items() if name not in placed and needed <= placed)
        if not level:
            raise ValueError(f"a circle of imports among {sorted(graph.keys() - placed)}")
        levels.append(level)
        placed.update(level)
    return levels


def picture_of(package: str) -> str:
    """Format the levels as text, highest first."""
    levels = [" ".join(level) for level in reversed(levels_of(graph_of(package)))]
    return "\n".join(f"{len(levels) - number:2}  {level}" for number, level in enumerate(levels))


def with_pictures(page: str) -> str:
    """Return the page with updated blocks."""
    for package in PACKAGES:
        mark = f"<!-- folders of {package} -->"
        block = f"{mark}\n```text\n{picture_of(package)}\n```"
        page = re.sub(rf"{re.escape(mark)}\n```text\n.*?```", lambda _, block=block: block, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_pictures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
