"""The shape of the code: which package may import which, and how large things may grow.

What fails here first is a convenient import in the wrong direction; `MAY_IMPORT` below says which are right.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import shardformer
from zoo_tests.architecture.sources import LIBRARY, REPOSITORY, files_of, named, tree_of

ALL = (*LIBRARY, "examples", "benchmarks", "zoo_tests")
# Package -> first names that it may import of what is ours.
MAY_IMPORT = {
    "shardformer": {"shardformer"},
    "booster": {"booster", "shardformer"},
    "plugins/hybrid_parallel": {"plugins", "booster", "shardformer"},
    "hybrid_booster": {"hybrid_booster", "plugins", "booster", "shardformer"},
    "examples": {"plugins", "booster", "shardformer"},
    "benchmarks": {"benchmarks", "plugins", "booster", "shardformer"},
}
OURS = {"shardformer", "booster", "plugins", "hybrid_booster", "examples", "benchmarks", "zoo_tests"}
# Phrases that readers had to guess at -> what to write: instead of, next to, the same, deferred, sharded, nothing, ...
NOT_PLAIN = (
    "in the place of",
    "beside",
    "alike",
    "puts? off",
    "deal(?:t|s)? out",
    "nobody",
    "somebody",
    "in vain",
    "anew",
    "goes? with",
    "in words",
)
# Files that give a module of the user, which keeps its identity, another forward or class; each says why.
MAY_PATCH = (
    "plugins/hybrid_parallel/compat/deepspeed_3d/patches.py",
    "plugins/hybrid_parallel/zero/bucket_layout.py",
    "shardformer/policies/plans/execution.py",  # for a pass of a tiny model: models also call `forward` themselves
    "shardformer/utils/untraced.py",
)
# Imported if it is there: apex has no package on the index, xformers is asked for by name, verl, which needs
# tensordict, asks for a transformers that is too old here, and Lightning and transformers need the others.
BROUGHT_BY_OTHERS = {
    "apex",
    "fused_layer_norm_cuda",
    "xformers",
    "verl",
    "tensordict",
    "torchmetrics",
    "tqdm",
    "triton",
}
MAX_FILE = 600
MIN_FILE = 75  # lines of a file that one other of its folder imports
MAX_IMPORTS_IN_FUNCTIONS = 47
MAX_LOOSE = 6  # files at the top of a package
MAX_FUNCTION = 60


def imports_in(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names; `from a import b` gives `a.b`, which may be a module or a name in one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: all but bodies of functions and what is for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import_time(child)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of the library."""
    found = {}
    for path in files_of(*LIBRARY):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def needed_by(name: str) -> frozenset[str]:
    """Modules of the library that `name` imports when it is imported: not in functions, nor for type checkers."""
    known = modules()
    needed = set()
    for target in imports_in(at_import_time(tree_of(known[name]))):
        module = target if target in known else target.rpartition(".")[0]
        if module in known and module != name:
            needed.add(module)
    return frozenset(needed)


def circle_in(graph: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """The first circle of a graph, node by node, or nothing."""
    done: set[str] = set()

    def from_here(node: str, path: tuple[str, ...]) -> tuple[str, ...]:
        if node in path:
            return (*path[path.index(node) :], node)
        if node in done:
            return ()
        for needed in sorted(graph.get(node, ())):
            circle = from_here(needed, (*path, node))
            if circle:
                return circle
        done.add(node)
        return ()

    return next(filter(None, (from_here(node, ()) for node in sorted(graph))), ())


def entries_of(package: str) -> dict[str, set[str]]:
    """What imports what among the files and folders of a package; a folder is all that lies in it."""

    def entry(module: str) -> str | None:
        if module == package:
            return "__init__"
        return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else None

    graph: dict[str, set[str]] = {}
    for name in modules():
        here = entry(name)
        if here is not None:
            there = {entry(needed) for needed in needed_by(name)} - {None, here}
            graph.setdefault(here, set()).update(there)
    return graph


def prose_of(path: Path) -> Iterator[str]:
    """Docstrings, messages and comments of a file: all strings of several words."""
    values = (node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant))
    yield from (value for value in values if isinstance(value, str) and " " in value)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_the_library_is_found() -> None:
    assert {"shardformer", "booster", "booster.launch", "plugins.hybrid_parallel"} <= modules().keys()


def test_names_that_are_imported_on_demand_are_listed() -> None:
    assert {*shardformer.__all__} <= {*dir(shardformer)}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{named(path)} imports {target}"
        for path in files_of(package)
        for target in imports_in(ast.walk(tree_of(path)))
        if target.partition(".")[0] in OURS - MAY_IMPORT[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_for_type_checkers_and_in_functions_exist() -> None:
    """Nothing runs these when the library is imported, so a file that moved leaves them behind."""
    known = modules()
    folders = {name.rpartition(".")[0] for name in known}
    gone = [
        f"{named(path)}:{node.lineno} {node.module}"
        for path in files_of(*LIBRARY)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in OURS
        if node.module not in known and node.module not in folders
    ]
    assert not gone, gone


def test_no_circle_of_files() -> None:
    circle = circle_in({name: needed_by(name) for name in modules()})
    assert not circle, " -> ".join(circle)


def test_no_circle_of_folders() -> None:
    packages = {name.rpartition(".")[0] for name in modules()} - {"", "plugins"}
    circles = {package: circle_in(entries_of(package)) for package in packages}
    assert not any(circles.values()), {package: circle for package, circle in circles.items() if circle}


@pytest.mark.parametrize("package", ["shardformer", "plugins/hybrid_parallel"])
def test_little_lies_loose(package: str) -> None:
    loose = [path.name for path in (REPOSITORY / package).glob("*.py")]
    assert len(loose) <= MAX_LOOSE, loose


def test_few_imports_wait_for_a_call() -> None:
    """Each is of a feature that few jobs use, or of a slow package, and says so; a circle is no reason."""
    found = [
        f"{named(path)}:{node.lineno}"
        for path in files_of(*LIBRARY)
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in OURS
    ]
    assert len(set(found)) <= MAX_IMPORTS_IN_FUNCTIONS, found


def test_no_thin_file() -> None:
    """A file of a few lines that one other of its folder imports is a part of that one."""
    importers: dict[str, set[str]] = {}
    for name in modules():
        for needed in needed_by(name):
            importers.setdefault(needed, set()).add(name)
    thin = [
        name
        for name, path in modules().items()
        if path.name != "__init__.py"
        and name.partition(".")[0] != "hybrid_booster"
        and len(path.read_text(encoding="utf-8").splitlines()) < MIN_FILE
        and {each.rpartition(".")[0] for each in importers.get(name, ())} == {name.rpartition(".")[0]}
        and len(importers[name]) == 1
    ]
    assert not thin, thin


def test_a_circle_is_found() -> None:
    assert circle_in({"a": ["b"], "b": ["c"], "c": ["b"]}) == ("b", "c", "b")
    assert circle_in({"a": ["b", "c"], "b": ["c"]}) == ()


def test_plugins_is_a_namespace() -> None:
    assert not (REPOSITORY / "plugins" / "__init__.py").exists(), "other distributions could not add plugins"


def test_transformers_is_imported_where_needed() -> None:
    early = [
        f"{named(path)} imports {target}"
        for path in files_of(*LIBRARY)
        for target in imports_in(at_import_time(tree_of(path)))
        # Models that we ship, and integrations, are imported only by who uses them.
        if target.partition(".")[0] == "transformers" and not {"models", "integrations"} & set(path.parts)
    ]
    assert not early, "\n".join(early)


def test_files_stay_short() -> None:
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files_of(*ALL)}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE}


def test_functions_stay_short() -> None:
    long = {
        f"{named(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in files_of(*ALL)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION
    }
    assert not long


def test_the_library_does_not_print() -> None:
    prints = [
        f"{named(path)}:{node.lineno}"
        for path in files_of(*LIBRARY)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints


def test_modules_are_replaced_and_not_patched() -> None:
    """A module that works differently is an object of another class; see `shardformer/utils/derived_modules.py`."""
    patches = [
        f"{named(path)}:{target.lineno} {ast.unparse(target)}"
        for path in files_of(*LIBRARY)
        if named(path) not in MAY_PATCH
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete)
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute) and target.attr in ("forward", "__class__")
        if isinstance(target.ctx, ast.Store | ast.Del)
    ]
    assert not patches, "\n".join(patches)


def test_no_star_imports() -> None:
    stars = [
        named(path)
        for path in files_of(*ALL)
        for target in imports_in(ast.walk(tree_of(path)))
        if target.endswith(".*")
    ]
    assert not stars


def test_what_is_imported_is_declared() -> None:
    """As a dependency where a module of the core imports it at its top, and anywhere else in an extra at least."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = set(map(_import_name, project["dependencies"]))
    optional = set(map(_import_name, chain(*project["optional-dependencies"].values())))
    ours = {*sys.stdlib_module_names, *OURS}
    undeclared = []
    for path in files_of(*LIBRARY):
        has_extra = {"integrations", "deepspeed_3d", "float8_cast.py"} & set(path.parts)
        early = set() if has_extra else set(imports_in(at_import_time(tree_of(path))))
        for target in set(imports_in(ast.walk(tree_of(path)))):
            name = target.partition(".")[0]
            if name not in needed | ours and (target in early or name not in optional | BROUGHT_BY_OTHERS):
                undeclared.append(f"{named(path)} imports {target}")
    assert not undeclared, "\n".join(undeclared)


def _import_name(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].replace("-", "_")


def test_files_say_what_they_are() -> None:
    silent = [named(path) for path in files_of(*LIBRARY) if not ast.get_docstring(tree_of(path))]
    assert not silent


def test_words_are_plain() -> None:
    """Docstrings, messages and comments of the library keep to plain English."""
    found = [
        f"{named(path)}: {words!r} in {text.strip()[:80]!r}"
        for path in files_of(*LIBRARY)
        for text in prose_of(path)
        for words in NOT_PLAIN
        if re.search(rf"\b{words}\b", text)
    ]
    assert not found, "\n".join(found)
