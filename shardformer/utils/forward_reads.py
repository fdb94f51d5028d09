"""What a module's forward reads of the module, in the order in which it runs, by its source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import nn

from shardformer.utils.module_paths import join
from shardformer.utils.source import syntax_of

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_GETTERS = ("get_input_embeddings", "get_output_embeddings")  # their calls stand for what they return
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
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in _GETTERS:
            return self._names(node.func)
        else:
            return None
        before = self._names(node.value)
        return None if before is None else [*before, name]


def _in_arm(place: Read, condition: ast.AST, arm: bool) -> Read:
    return replace(place, arms=place.arms | {(id(condition), arm)})


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
