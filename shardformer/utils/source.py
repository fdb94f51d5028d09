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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn

from shardformer.utils.module_paths import join

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_FILES = 16  # a tree takes megabytes
_BODIES = ("body", "orelse", "handlers", "finalbody", "cases")


def syntax_of(defined: type | Callable[..., Any]) -> Definition:
    """Return the shared, read-only syntax tree of a class or function; OSError if it has no source."""
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
    """Return the globals and attributes that a function looks up by name, `@` as `matmul`; none in C code."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return set() if code is None else set(_names_in(code))


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    product = any(each.opname == "BINARY_OP" and each.argrepr == "@" for each in dis.get_instructions(code))
    nested = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]  # functions, comprehensions
    return frozenset(code.co_names).union(["matmul"] if product else [], *nested)


def with_globals(function: FunctionType, values: dict[str, Any]) -> FunctionType:
    """Return a copy of a function with other globals, decorators' kept; ValueError if it is not in a closure."""
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
    """A place where a forward reads an attribute of its module, or calls it."""

    # of the attribute in the model, as "bert.embeddings.word_embeddings.weight"; "" for the model itself, which is
    # handed to other code
    path: str
    is_call: bool = False  # whether it is called
    # names of the keyword arguments that are constants other than False and None
    arguments: frozenset[str] = frozenset()
    repeats: bool = False  # whether it is in a loop
    # the conditions around it and their arms; places in different arms of one condition exclude each other
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
