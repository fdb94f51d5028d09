"""Which names of others the library uses that their documentation does not promise, and which release changed one.

    python -m zoo_tests.architecture.transformers_names FOLDER ...

writes `transformers_names.json`; each folder has the `transformers` package of a release, as of `pip install --no-deps
--target FOLDER transformers==5.21.1`, or `torch`, or `lightning`, or several of them. Names and sources are read, and
nothing is imported.

A name of transformers counts if it is imported from a sub-module, read from or written to one (`masking_utils.…`), or
starts with an underscore and belongs to one of the classes in `_OWNERS`. Of torch and Lightning a name counts if a part
of it starts with an underscore.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from zoo_tests.architecture.sources import REPOSITORY, tree_of

LIST = Path(__file__).with_suffix(".json")
_LIBRARY = ("shardformer", "booster", "plugins", "hybrid_booster")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_MODULE = re.compile(r"transformers(\.\w+)+")
# Modules with the classes whose private members the library may meet.
_OWNERS = (
    "modeling_utils",
    "configuration_utils",
    "trainer",
    "training_args",
    "generation.utils",
    "models.auto.auto_factory",
    "cache_utils",
    "masking_utils",
    "core_model_loading",
    "integrations.peft",
    "modeling_layers",
    "dynamic_module_utils",
)
# The same of packages whose public names are promised, those that their documentation does not have among them too.
_OTHERS = {
    "torch": ("nn.modules.module", "optim.optimizer", "optim.lr_scheduler", "_tensor", "utils.data.dataloader")
    + ("_C._distributed_c10d",),
    "lightning": ("pytorch.trainer.trainer", "pytorch.core.module", "pytorch.core.optimizer", "fabric.fabric")
    + ("fabric.wrappers", "pytorch.strategies.strategy", "pytorch.trainer.connectors.accelerator_connector"),
}
# Of torch, whose modules transformers' classes derive from.
_TORCH = frozenset(
    ("_buffers", "_parameters", "_modules", "_apply", "_load_from_state_dict", "_metadata")
    + ("_non_persistent_buffers_set", "_orig_mod", "_last_lr", "_forward_hooks", "_forward_pre_hooks")
)
# The library's own names, which a class of the others has by coincidence.
_OWN = frozenset(("_save", "_prefix", "_timeout", "_schedulers"))


def used_names(transformers: Path) -> dict[str, set[str]]:
    """Dotted name -> files of the library that use it.

    Args:
        transformers: folder of the package.
    """
    members = _private_members(transformers, _OWNERS)

    def names_in(tree: ast.AST) -> Iterator[str]:
        yield from _of_modules(tree, transformers)
        yield from (members[name] for name in _private_in(tree) - _TORCH if name in members)

    return _used(names_in)


def used_private_names(package: Path) -> dict[str, set[str]]:
    """Dotted name -> files of the library that use it, of a package in `_OTHERS`.

    Args:
        package: folder of it.
    """
    members = _private_members(package, _OTHERS[package.name])
    imports = partial(_imports_from, package.name)

    def names_in(tree: ast.AST) -> Iterator[str]:
        yield from _private_paths(tree, package)
        # Lightning's classes are met where it is imported; torch's are everywhere.
        if package.name == "torch" or any(map(imports, ast.walk(tree))):
            yield from (members[name] for name in _private_in(tree, of_self=False) if name in members)

    return _used(names_in)


def _used(names_in: Callable[[ast.AST], Iterator[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in sorted(path for package in _LIBRARY for path in (REPOSITORY / package).rglob("*.py")):
        for name in set(names_in(tree_of(file))):
            found.setdefault(name, set()).add(str(file.relative_to(REPOSITORY)))
    return found


def state_of(name: str, transformers: Path) -> dict[str, str] | None:
    """What a release has under a dotted name; None if it has nothing.

    Returns:
        "text": signature of a function, bases of a class, value of an attribute, or "module"; "digest": of its source
        without comments and docstrings.
    """
    module, member = _split(name, transformers)
    if module is None:
        return None
    if not member:
        return {"text": "module", "digest": ""}
    nodes = [tree_of(_file_of(module, transformers))]
    for part in member.split("."):
        nodes = [child for node in nodes for child in _definitions(node) if part in _targets(child)]
    return _described(nodes[0]) if nodes else None


def version_of(package: Path) -> str:
    """Version of a package, without the name of its build."""
    files = (package / name for name in ("version.py", "version.info", "__init__.py"))
    text = next(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return re.search(r"""^(?:__version__ = ["'])?(\d[\w.]*)""", text, re.M)[1]


def read_list() -> dict[str, Any]:
    """Package -> "releases", oldest first, and "names": dotted name -> states, each with its first "release"."""
    return json.loads(LIST.read_text(encoding="utf-8"))


def make_list(folders: list[Path]) -> dict[str, Any]:
    """The list of what the library uses, with a state for each of the releases that changed it.

    Args:
        folders: with packages, in any order.
    """
    return {name: _list_of(name, folders) for name in ("transformers", *_OTHERS)}


def names_of(package: Path) -> dict[str, set[str]]:
    """Dotted name -> files of the library that use it."""
    return used_names(package) if package.name == "transformers" else used_private_names(package)


def _list_of(package_name: str, folders: list[Path]) -> dict[str, Any]:
    found = (folder / package_name for folder in folders if (folder / package_name).is_dir())
    by_version = {version_of(package): package for package in found}
    packages = [by_version[version] for version in sorted(by_version, key=_ordered)]
    names: dict[str, list[dict[str, str | None]]] = {}
    for name in sorted(names_of(packages[-1])):
        states = names[name] = []
        for package in packages:
            state = state_of(name, package) or {"text": None, "digest": None}
            if not states or any(states[-1][key] != state[key] for key in state):
                states.append({"release": version_of(package), **state})
    return {"releases": [version_of(package) for package in packages], "names": names}


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# ----- what the library uses -----


def _of_modules(tree: ast.AST, transformers: Path) -> Iterator[str]:
    """Names imported from sub-modules, attributes of sub-modules, and sub-modules named by strings."""
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if _split(name, transformers)[1] == "":  # a module
                    local[alias.asname or alias.name] = name
                elif node.module != "transformers":
                    yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            module, member = _split(node.value, transformers)
            yield from [node.value] if module is not None and not member else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local:
            yield f"{local[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Call) and len(node.args) > 1:  # getattr, setattr, patch.object
            owner, name = node.args[:2]
            if isinstance(owner, ast.Name) and owner.id in local and isinstance(name, ast.Constant):
                yield f"{local[owner.id]}.{name.value}"


def _private_in(tree: ast.AST, of_self: bool = True) -> set[str]:
    """Private names that are read, written, defined by a class, or given as strings.

    Args:
        of_self: whether those count that are read from or written to `self`, which may be the library's own.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= {node.attr} if of_self or not is_of_self else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ClassDef):
            found |= {name for child in node.body for name in _targets(child)}
    return {name for name in found if _PRIVATE.fullmatch(name)} - _OWN


def _imports_from(package: str, node: ast.AST) -> bool:
    """Whether a node is an import of the package or of what is in it."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == package for name in names)


def _private_paths(tree: ast.AST, package: Path) -> Iterator[str]:
    """Modules, and members of modules, whose dotted name has a private part."""
    local: dict[str, str] = {}
    for node in filter(partial(_imports_from, package.name), ast.walk(tree)):
        for alias in node.names:
            name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            short = name if isinstance(node, ast.ImportFrom) or alias.asname else name.partition(".")[0]
            if name.partition(".")[0] == package.name:
                local[alias.asname or short.rpartition(".")[2]] = short

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        return local.get(node.id) if isinstance(node, ast.Name) else None

    for path in {*local.values(), *filter(None, map(dotted, ast.walk(tree)))} - {package.name}:
        module, member = _split(path, package)
        if module is None and package.name == "torch":  # operators, which no file of Python defines
            module, member = "_C._VariableFunctions", path.split(".")[1]
        name = f"{module}.{member.partition('.')[0]}".strip(".")
        if module is not None and any(map(_PRIVATE.fullmatch, name.removeprefix("_C._VariableFunctions.").split("."))):
            yield f"{package.name}.{name}"


@cache
def _private_members(package: Path, owners: tuple[str, ...]) -> dict[str, str]:
    """Private name -> dotted name of the member of a class in these modules, or of what functions add to objects."""
    found: dict[str, str] = {}
    modules = {module: tree_of(_file_of(module, package)) for module in owners}
    classes = [(f"{module}.{node.name}", node) for module, tree in modules.items() for node in _classes(tree)]
    for owner, node in (*classes, *modules.items()):
        for name in (name for child in _definitions(node) for name in _targets(child)):
            if _PRIVATE.fullmatch(name) and (isinstance(node, ast.ClassDef) or name in _set_in(node)):
                found.setdefault(name, f"{package.name}.{owner}.{name}")
    return found


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


@cache
def _set_in(tree: ast.Module) -> frozenset[str]:
    """Attributes that are set anywhere in a module."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in nodes)


# ----- what a release has -----


def _split(name: str, transformers: Path) -> tuple[str | None, str]:
    """The longest sub-module that a dotted name begins with, and the rest; (None, …) if there is none."""
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        if _file_of(".".join(parts[:count]), transformers) is not None:
            return ".".join(parts[:count]), ".".join(parts[count:])
    return None, name


@cache
def _file_of(module: str, transformers: Path) -> Path | None:
    path = transformers.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi"), path / "__init__.pyi")
    return next((each for each in candidates if each.is_file()), None)


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that define names of a module or a class, also under a condition, or by `object.name = …`."""
    yield from node.body
    for child in node.body:
        if isinstance(child, ast.If | ast.Try):
            yield from _definitions(child)
    if isinstance(node, ast.ClassDef | ast.Module):
        assigned = (each for each in ast.walk(node) if isinstance(each, ast.Assign | ast.AnnAssign))
        yield from (each for each in assigned if any(isinstance(target, ast.Attribute) for target in _assigned(each)))


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _targets(node: ast.AST) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom | ast.Import):
        return {alias.asname or alias.name for alias in node.names}
    targets = _assigned(node) if isinstance(node, ast.Assign | ast.AnnAssign) else []
    own = [each.attr for each in targets if isinstance(each, ast.Attribute)]
    return {*own, *(each.id for each in targets if isinstance(each, ast.Name))}


def _described(node: ast.AST) -> dict[str, str]:
    if isinstance(node, ast.ImportFrom):  # of many names, of which others may come and go
        return {"text": f"from {'.' * node.level}{node.module or ''}", "digest": ""}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        text = f"({ast.unparse(node.args)})"
    elif isinstance(node, ast.ClassDef):
        text = f"class({', '.join(map(ast.unparse, node.bases))})"
    else:
        text = ast.unparse(node)
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            inner.body = body[1:] or [ast.Pass()]
    digest = hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]
    return {"text": text if len(text) <= 160 else f"{text[:159]}…", "digest": digest}


if __name__ == "__main__":
    given = [Path(folder) for folder in sys.argv[1:]]
    LIST.write_text(json.dumps(make_list(given), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
