"""What the forward of a class does, read from its syntax tree: known blocks, activations, and loops over layers."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import FunctionType

from shardformer.utils.source import syntax_of, with_globals

_OF_EVERY_LAYER = ("self", "hidden_states", "attention_mask", "position_ids", "past_key_values", "use_cache") + (
    "output_attentions",
    "output_hidden_states",
)


def definer(cls: type) -> type:
    """Return the class whose forward runs."""
    return next(each for each in cls.__mro__ if "forward" in vars(each))


@cache
def statements_of(cls: type) -> str:
    """Return the statements of the class's own forward, in the form of `parsed`; "" without source or if decorated."""
    forward = next((each for each in _methods(cls) if each.name == "forward"), None)
    return "" if forward is None or forward.decorator_list else _dump(forward.body)


@cache
def parsed(text: str) -> str:
    """Return statements, such as "x = self.dense(x); return x", in a form that layout and comments do not change."""
    return _dump(ast.parse(text).body)


def _dump(statements: list[ast.stmt]) -> str:
    return ";".join(ast.dump(each) for each in statements if not _is_text(each))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@cache
def inputs_between_layers(cls: type, layers: str) -> tuple[str, ...]:
    """Return the inputs of a class's forward that it reads between calls of the layers in `self.<layers>`.

    Flags, caches, and the masks and positions that each layer reads as well are left out; so are inputs that the
    forward assigns before.
    """
    forward = next((each for each in _methods(definer(cls)) if each.name == "forward"), None)
    if forward is None:
        return ()
    assigned = {node.id for node in ast.walk(forward) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    inputs = [each.arg for each in (*forward.args.args, *forward.args.kwonlyargs)]
    read = {name for loop in ast.walk(forward) if isinstance(loop, ast.For) for name in _read_around(loop, layers)}
    return tuple(each for each in inputs if each in read - assigned and each not in _OF_EVERY_LAYER)


def _read_around(loop: ast.For, layers: str) -> set[str]:
    """Return the variables that the body of a loop over `self.<layers>` reads outside of the calls of its layers."""
    if all(_own_name(node) != layers for node in ast.walk(loop.iter)):
        return set()
    targets = _variables(loop.target)
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and _variables(node.func) & targets]
    inside = {node for call in calls for node in ast.walk(call)}
    around = [node for statement in loop.body for node in ast.walk(statement) if node not in inside]
    return {node.id for node in around if isinstance(node, ast.Name)} if calls else set()


@cache
def counts_positions(cls: type) -> bool | None:
    """Return whether a class's forward counts positions by the length of its input: `torch.arange(x.shape[1])`.

    None if it counts other things by `torch.arange` as well, or a decorator hides it.
    """
    forward = next((each for each in _methods(definer(cls)) if each.name == "forward"), None)
    if forward is None or len(forward.args.args) < 2:
        return False
    x = forward.args.args[1].arg
    lengths = {f"{x}.shape[1]", f"{x}.shape[-2]", f"{x}.size(1)", f"{x}.size(-2)"}
    for node in ast.walk(forward):  # `length = x.shape[1]`, or `_, length, _ = x.shape`
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], ast.unparse(node.value)
            if isinstance(target, ast.Name) and value in lengths:
                lengths.add(target.id)
            elif isinstance(target, ast.Tuple) and len(target.elts) == 3 and value in (f"{x}.shape", f"{x}.size()"):
                lengths.add(ast.unparse(target.elts[1]))
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call)]
    counted = [call.args for call in calls if ast.unparse(call.func) == "torch.arange" and len(call.args) == 1]
    of_input = [ast.unparse(args[0]) in lengths for args in counted]
    if not any(of_input):
        return False
    return True if all(of_input) and _is_found(definer(cls).forward, forward) else None


def _is_found(function: FunctionType, node: ast.FunctionDef) -> bool:
    """Return whether the function with the tree `node` is found below the decorators of `function`."""
    try:
        with_globals(function, {})
        return syntax_of(function).lineno == node.lineno
    except (AttributeError, OSError, ValueError):
        return False


def _variables(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


@cache
def activated_linears(cls: type) -> tuple[tuple[str, str], ...]:
    """Return (linear, activation) of each `self.activation` that reads only what `self.linear` returns, and is alone.

    Both are named once in all methods but `__init__`, so that no other code sees a product without its bias.
    """
    methods = _methods(cls)
    named = Counter(name for each in methods for node in ast.walk(each) if (name := _own_name(node)) is not None)
    pairs = [pair for each in methods for pair in _pairs(each)]
    return tuple(pair for pair in pairs if all(named[name] == 1 for name in pair))


def _pairs(method: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for node in ast.walk(method):
        outer = _called(node)
        inner = _called(node.args[0]) if outer is not None and len(node.args) == 1 else None
        if outer is not None and inner is not None:
            yield inner, outer
        for body in filter(None, (getattr(node, field, None) for field in ("body", "orelse"))):
            for first, second in zip(body, body[1:], strict=False) if isinstance(body, list) else ():
                yield from _pair(first, second)


def _pair(first: ast.stmt, second: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the pair of `x = self.linear(...)` that is followed by `x = self.activation(x)`."""
    if not all(isinstance(each, ast.Assign) and len(each.targets) == 1 for each in (first, second)):
        return
    names = [each.targets[0].id if isinstance(each.targets[0], ast.Name) else None for each in (first, second)]
    linear, activation = _called(first.value), _called(second.value)
    if linear is None or activation is None or names[0] is None or names[0] != names[1]:
        return
    if not second.value.keywords and [getattr(each, "id", None) for each in second.value.args] == [names[0]]:
        yield linear, activation


def _called(node: ast.AST) -> str | None:
    """Return the name of an own sub-module that the node calls; None for another node."""
    return _own_name(node.func) if isinstance(node, ast.Call) else None


def _own_name(node: ast.AST) -> str | None:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own else None


def _methods(cls: type) -> list[ast.FunctionDef]:
    """Return the syntax trees of the methods of a class but `__init__`; none without its source."""
    try:
        body = syntax_of(cls).body
    except OSError:  # classes from a prompt, or in C
        return []
    return [each for each in body if isinstance(each, ast.FunctionDef) and each.name != "__init__"]
