"""What the forward of a class does and reads, from its syntax tree: known blocks, activations, loops over layers."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType, SimpleNamespace

from torch import nn

from shardformer.utils.module_paths import join
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


@cache
def computes_tokens(cls: type) -> bool:
    """Return whether a class's forward takes one tensor, and only calls own sub-modules, adds and multiplies.

    If these compute each token by itself, so does the forward. A forward of this package stands for the native one.
    """
    native = next((each for each in cls.__mro__ if _has_own_forward(each)), cls)
    if native is nn.Sequential:
        return True
    forward = next((each for each in _methods(native) if each.name == "forward"), None)
    if forward is None or forward.decorator_list or len(forward.args.args) != 2 or forward.args.kwonlyargs:
        return False
    nodes = [node for statement in forward.body for node in ast.walk(statement)]
    return all(_is_of_tokens(node) for node in nodes) and not (forward.args.vararg or forward.args.kwarg)


def _has_own_forward(cls: type) -> bool:
    return "forward" in vars(cls) and not cls.__module__.startswith("shardformer.transforms")


def _is_of_tokens(node: ast.AST) -> bool:
    """Return whether a node is no loop, index or call that could mix tokens."""
    if not isinstance(node, ast.Call):
        return not isinstance(node, (*_LOOPS, ast.Subscript, ast.MatMult, ast.Lambda, *_COMPREHENSIONS))
    if _called(node) is not None or ast.unparse(node.func) == "isinstance":
        return True
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method == "to" or (method == "chunk" and any(ast.unparse(each) == "dim=-1" for each in node.keywords))


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


_LOOPS = (ast.For, ast.AsyncFor, ast.While)
GETTERS = ("get_input_embeddings", "get_output_embeddings")  # their calls stand for what they return
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


@dataclass(frozen=True)
class Read:
    """A place where a forward reads an attribute of its module, or calls it.

    Attributes:
        path: of the attribute in the model, as "bert.embeddings.word_embeddings.weight"; "" for the model itself, which
            is handed to other code.
        is_call: whether it is called.
        arguments: names of the keyword arguments that are constants other than False and None.
        repeats: whether it is in a loop.
        arms: the conditions around it and their arms; places in different arms of one condition exclude each other.
    """

    path: str
    is_call: bool = False
    arguments: frozenset[str] = frozenset()
    repeats: bool = False
    arms: frozenset[tuple[int, bool]] = frozenset()

    def excludes(self, other: Read) -> bool:
        """Return whether one pass reaches at most one of both places."""
        return any((condition, not arm) in other.arms for condition, arm in self.arms)


def reads_of_forward(model: nn.Module, opened: Collection[str] = ()) -> list[Read]:
    """Return what the forward of a model reads of it, in the order in which it runs; methods that it calls included.

    Args:
        opened: paths of modules that are called, of which the reads of their own forward follow too.

    Raises:
        OSError: the source is not available, or the forward of this object has been replaced.
    """
    return list(_Forward(model, "", opened).reads())


class _Forward:
    """The forward of the module at `path`."""

    def __init__(self, module: nn.Module, path: str, opened: Collection[str]) -> None:
        self.module, self.path, self.opened = module, path, opened
        self.running: list[tuple[type, str]] = []  # (class that defines it, name) of the methods being read
        self.names: list[str] = []  # of the module in these methods: "self"

    def reads(self) -> Iterator[Read]:
        replaced = vars(self.module).get("forward")
        if getattr(replaced, "__self__", None) is self.module and inspect.isfunction(replaced.__func__):
            yield from self._method([SimpleNamespace(forward=replaced.__func__)], "forward", Read(self.path))
        elif "forward" in vars(self.module):
            raise OSError(f"the forward of this {type(self.module).__name__} was replaced")
        elif type(self.module).forward is nn.Sequential.forward:
            for name, _ in self.module.named_children():
                yield from self._called(Read(join(self.path, name), is_call=True))
        else:
            yield from self._method(type(self.module).__mro__, "forward", Read(self.path))

    def _method(self, classes: Iterable[type], name: str, place: Read) -> Iterator[Read]:
        """Yield the reads of the method that the first of these classes defines."""
        definer = next((each for each in classes if name in vars(each)), None)
        if definer is None or not inspect.isroutine(vars(definer)[name]) or (definer, name) in self.running:
            yield replace(place, path=self.path)
            return
        tree = syntax_of(vars(definer)[name])
        self.running.append((definer, name))
        self.names.append(tree.args.args[0].arg if tree.args.args else "")
        yield from self._block(tree.body, place)
        self.running.pop()
        self.names.pop()

    def _block(self, statements: Iterable[ast.AST], place: Read) -> Iterator[Read]:
        for statement in statements:
            yield from self._visit(statement, place)
            if isinstance(statement, ast.If):  # what follows an arm that returns is the other arm
                for arm, body in ((True, statement.body), (False, statement.orelse)):
                    if body and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
                        place = _in_arm(place, statement, not arm)

    def _visit(self, node: ast.AST, place: Read) -> Iterator[Read]:
        if isinstance(node, ast.If | ast.IfExp):
            yield from self._visit(node.test, place)
            for arm, body in ((True, node.body), (False, node.orelse)):
                yield from self._block(body if isinstance(body, list) else [body], _in_arm(place, node, arm))
        elif isinstance(node, _LOOPS):
            yield from self._visit(node.test if isinstance(node, ast.While) else node.iter, place)
            yield from self._block(node.body, replace(place, repeats=True))
            yield from self._block(node.orelse, place)
        elif isinstance(node, _COMPREHENSIONS):
            for generator in node.generators:
                yield from self._visit(generator.iter, place)
                place = replace(place, repeats=True)
                yield from self._block(generator.ifs, place)
            made = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
            yield from self._block(made, place)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from self._block([each for each in (node.value, getattr(node, "target", None)) if each], place)
            yield from self._block(getattr(node, "targets", ()), place)
        elif isinstance(node, ast.Call) and self._names(node) is None:
            yield from self._call(node, place)
        elif (names := self._names(node)) is not None:
            yield replace(place, path=".".join(filter(None, (self.path, *names))))
        else:
            yield from self._block(ast.iter_child_nodes(node), place)

    def _call(self, node: ast.Call, place: Read) -> Iterator[Read]:
        """Yield the reads of the arguments, then that of what is called."""
        function, names = node.func, self._names(node.func)
        yield from self._block([*node.args, *(each.value for each in node.keywords)], place)
        said = {each.arg: each.value for each in node.keywords if each.arg and isinstance(each.value, ast.Constant)}
        given = {name for name, value in said.items() if value.value not in (False, None)}
        if isinstance(function, ast.Attribute) and _is_super(function.value):
            classes = type(self.module).__mro__
            behind = classes[classes.index(self.running[-1][0]) + 1 :]
            yield from self._method(behind, function.attr, place)
        elif names is None:
            yield from self._visit(function, place)
        elif len(names) == 1 and names[0] not in self.module._modules and hasattr(type(self.module), names[0]):
            yield from self._method(type(self.module).__mro__, names[0], place)
        else:
            path = ".".join(filter(None, (self.path, *names)))
            yield from self._called(replace(place, path=path, is_call=True, arguments=frozenset(given)))

    def _called(self, call: Read) -> Iterator[Read]:
        if call.path not in self.opened:
            yield call
            return
        module = self.module.get_submodule(call.path.removeprefix(self.path).removeprefix("."))
        for read in _Forward(module, call.path, self.opened).reads():
            yield replace(read, repeats=call.repeats or read.repeats, arms=call.arms | read.arms)

    def _names(self, node: ast.AST) -> list[str] | None:
        """Return the names in `self.encoder["text"].model`; None for other expressions."""
        if isinstance(node, ast.Name):
            return [] if node.id == self.names[-1] else None
        if isinstance(node, ast.Attribute):
            name: str | None = node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = str(node.slice.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in GETTERS:
            return self._names(node.func)
        else:
            return None
        before = self._names(node.value)
        return None if before is None else [*before, name]


def _in_arm(place: Read, condition: ast.AST, arm: bool) -> Read:
    return replace(place, arms=place.arms | {(id(condition), arm)})


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
