"""What functions and classes consist of: the syntax tree of their source, the names that their code looks up, the loss.

`inspect.getsource` reads a file's tokens or its whole tree for every function and class that it is asked for. A model
has dozens of them in a file or two, so each file is parsed once.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_FILES = 16  # a tree takes megabytes
_BODIES = ("body", "orelse", "handlers", "finalbody", "cases")


def syntax_of(defined: type | Callable[..., Any]) -> Definition:
    """Return the syntax tree of a class or function, which is shared: it must not be changed.

    Raises:
        OSError: if the source is not available: C code, code from a prompt or from `exec`, and lambdas.
    """
    defined = inspect.unwrap(defined)
    try:
        file = inspect.getsourcefile(defined) or inspect.getfile(defined)
        module = sys.modules.get(defined.__module__)
        definitions = _definitions("".join(linecache.getlines(file, module and vars(module))))
    except (TypeError, SyntaxError) as error:
        raise OSError(f"the source of {defined!r} is not available") from error
    code = getattr(defined, "__code__", None)
    found = definitions.get(defined.__qualname__ if code is None else code.co_firstlineno)
    if found is None or (code is not None and found.name != code.co_name):
        raise OSError(f"the source of {defined!r} is not available")
    return found


@lru_cache(_FILES)
def _definitions(text: str) -> dict[str | int, Definition]:
    """Return the definitions in a file: classes by their qualified names, functions by their first lines."""
    found: dict[str | int, Definition] = {}
    for name, node in _nested(ast.parse(text).body):
        is_class = isinstance(node, ast.ClassDef)
        found.setdefault(name if is_class else min(each.lineno for each in (node, *node.decorator_list)), node)
    return found


def _nested(statements: Iterable[ast.AST], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield the qualified name and the tree of every class and function in `statements`, at any depth."""
    for node in statements:
        within = prefix
        if isinstance(node, Definition):
            yield prefix + node.name, node
            within += f"{node.name}." if isinstance(node, ast.ClassDef) else f"{node.name}.<locals>."
        yield from _nested(chain.from_iterable(getattr(node, field, ()) for field in _BODIES), within)


def names_read_by(function: Any) -> set[str]:
    """Return the globals and attributes that a function looks up by name; none if it is not written in Python.

    The operator `@` is `matmul`.
    """
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return set() if code is None else set(_names_in(code))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    if any(each.opname == "BINARY_OP" and each.argrepr == "@" for each in dis.get_instructions(code)):
        yield "matmul"
    for constant in code.co_consts:  # nested functions and comprehensions
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def with_globals(function: FunctionType, values: dict[str, Any]) -> FunctionType:
    """Return a copy of the function whose globals have other `values`; its decorators keep theirs.

    Raises:
        ValueError: a decorator has the function in another place than its closure.
    """
    inner, code, cells = vars(function).get("__wrapped__"), function.__code__, function.__closure__
    names = function.__globals__ if inner is not None else {**function.__globals__, **values}
    if inner is not None:
        changed = with_globals(inner, values)
        cells = tuple(CellType(changed) if _holds(cell, inner) else cell for cell in cells or ())
        if cells == (function.__closure__ or ()):
            raise ValueError(f"a decorator hides the code of {function.__qualname__}")
    copied = FunctionType(code, names, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    vars(copied).update(vars(function) | ({} if inner is None else {"__wrapped__": changed}))
    return copied


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # the cell is not bound yet
        return False


Forward = Callable[..., Any]


@cache
def calls_loss_function(forward: Forward) -> bool:
    """Return whether `forward` calls transformers' `self.loss_function`."""
    return bool(_loss_calls(forward))


@cache
def passes_keywords(forward: Forward) -> bool:
    """Return whether `forward` passes unknown keywords (`num_items_in_batch`, ...) on to `self.loss_function`."""
    return any(keyword.arg is None for call in _loss_calls(forward) for keyword in call.keywords)


@cache
def adds_to_loss(forward: Forward) -> bool:
    """Return whether the loss is more than one call of `self.loss_function` and the auxiliary loss of routers."""
    values = [node.value for node in ast.walk(_tree(forward)) if _assigns_loss(node)]
    return len(_loss_calls(forward)) > 1 or not all(map(_is_known, values))


def uses(forward: Forward, name: str) -> bool:
    """Return whether `forward` has a variable, a parameter or a constant equal to `name`."""
    return name in _words(forward)


@cache
def reads(forward: Forward, expression: str) -> bool:
    """Return whether `forward` has an attribute or a call, as `ast.unparse` writes it: "self.config.pad_token_id"."""
    found = (node for node in ast.walk(_tree(forward)) if isinstance(node, ast.Attribute | ast.Call))
    return any(ast.unparse(node) == expression for node in found)


@cache
def _words(forward: Forward) -> frozenset[str]:
    """Return the names of variables and parameters of `forward`, and its texts."""
    found = (getattr(node, field, None) for node in ast.walk(_tree(forward)) for field in ("id", "arg", "value"))
    return frozenset(each for each in found if isinstance(each, str))


def _tree(forward: Forward) -> ast.AST:
    try:
        return syntax_of(forward)
    except OSError:
        return ast.Module([], [])


def _loss_calls(forward: Forward) -> list[ast.Call]:
    calls = (node for node in ast.walk(_tree(forward)) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func) == "self.loss_function"]


def _assigns_loss(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(isinstance(target, ast.Name) and target.id == "loss" for target in targets)


def _is_known(value: ast.AST) -> bool:
    """Return whether `value` is None, the loss of an inner model, or an auxiliary loss with its factor."""
    text = ast.unparse(value)
    return text in ("None", "outputs.loss") or text.startswith("self.loss_function(") or "aux_loss" in text
