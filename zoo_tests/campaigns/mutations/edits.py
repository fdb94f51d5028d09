"""Mutants that change one line: a sign, a scale, a group, a comparison, in the functions that do the arithmetic.

A rank compiles the changed source and gives its functions the new code, so that whoever has imported one calls it too.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Edit:
    """One change of a line.

    Attributes:
        module: dotted name.
        old: what is replaced, found once in the source of the module.
        new: what takes its place.
        tests: the tests that have to notice; each of them.
    """

    module: str
    old: str
    new: str
    tests: tuple[str, ...]

    def changed_source(self) -> str:
        """The source of the module with the fault in it.

        Raises:
            ValueError: `old` is not there, not once, or starts within a dotted name of which `new` leaves a part.
        """
        source = Path(importlib.import_module(self.module).__file__).read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ValueError(f"{self.module} has {self.old!r} {source.count(self.old)} times, not once")
        before, word = source[source.index(self.old) - 1], re.match(r"\w*", self.old)[0]
        if word and re.match(r"[\w.]", before) and not self.new.startswith(word):
            raise ValueError(f"{self.module} has a longer name where {self.old!r} starts")
        return source.replace(self.old, self.new)

    def apply(self) -> None:
        """Put the fault into this process's library.

        Raises:
            ValueError: it changes no function.
        """
        module = importlib.import_module(self.module)
        new_codes = _by_name(_codes_in(compile(self.changed_source(), module.__file__, "exec")))
        functions = {function.__code__: function for function in _functions_of(module)}
        changed = False
        for name, codes in _by_name(functions).items():
            # A getter and its setter have one name, and come in the order of their lines.
            for code, new in zip(codes, new_codes[name], strict=True):
                changed |= (
                    code.co_code != new.co_code or code.co_consts != new.co_consts or code.co_names != new.co_names
                )
                functions[code].__code__ = new
        if not changed:
            raise ValueError(f"{self.new!r} changes no function of {self.module}")


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code of the functions and classes that a piece of code defines, at any depth but inside of functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            if not constant.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
                yield from _codes_in(constant)


def _by_name(codes: Iterable[CodeType]) -> dict[str, list[CodeType]]:
    """Qualified name -> the codes of that name, by their first lines."""
    found: dict[str, list[CodeType]] = defaultdict(list)
    for code in sorted(codes, key=lambda code: code.co_firstlineno):
        if code.co_flags & inspect.CO_OPTIMIZED:  # of a function
            found[code.co_qualname].append(code)
    return found


def _functions_of(owner: ModuleType | type) -> Iterator[FunctionType]:
    """Functions and methods that are defined in a module, under their decorators."""
    home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == home and not issubclass(value, BaseException):
            yield from _functions_of(value)
            continue
        for part in _under_decorators(value):
            if isinstance(part, FunctionType) and part.__module__ == home and part.__code__.co_filename.endswith(".py"):
                yield part


def _under_decorators(value: Any) -> Iterator[Any]:
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, staticmethod | classmethod):
        parts = [value.__func__]
    else:
        parts = [getattr(value, "func", value)]  # a cached property
    return (inspect.unwrap(part) for part in parts if part is not None)
