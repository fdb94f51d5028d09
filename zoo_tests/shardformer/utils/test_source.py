"""Syntax trees of functions and classes are those that Python's own tools find, wherever a definition stands.

What breaks here first: a definition that is found by the wrong line or name, so that fusion, masks or losses read
another one.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from transformers.models.llama import modeling_llama

from shardformer.utils.source import names_read_by, syntax_of


def _twice(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*given: Any) -> Any:
        return function(*given), function(*given)

    return call


if inspect:

    class _Outer:
        class Inner:
            @_twice
            @functools.cache  # noqa: B019 (never called)
            def forward(self) -> int:
                return len(self.parts)

        @staticmethod
        def forward() -> int:
            return 2


def _local() -> type:
    class Inner:
        def forward(self) -> int:
            return sum(part.size for part in self.own)

    return Inner


@pytest.mark.parametrize(
    "defined",
    [
        *(_Outer, _Outer.Inner, _Outer.Inner.forward, _Outer.forward, _local(), _local().forward, _twice),
        *(modeling_llama.LlamaMLP, modeling_llama.LlamaModel.forward, modeling_llama.LlamaForCausalLM),
    ],
)
def test_finds_what_the_interpreter_finds(defined: Any) -> None:
    expected = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(defined)))).body[0]
    found = ast.parse(ast.unparse(syntax_of(defined))).body[0]  # texts of several lines are indented as they stand
    assert _without_texts(found) == _without_texts(expected)


def _without_texts(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return ast.dump(tree)


def test_code_without_a_file_has_no_source() -> None:
    made: dict[str, Any] = {}
    exec("class Made:\n    def forward(self): return 1", made)
    for defined in (made["Made"], made["Made"].forward, len, int, lambda: 1):
        with pytest.raises(OSError, match="is not available"):
            syntax_of(defined)


def test_names_are_those_of_nested_code_too() -> None:
    assert names_read_by(_local().forward) == {"own", "size", "sum"}
    assert names_read_by(_Outer.Inner.forward) == {"len", "parts"}
    assert names_read_by(len) == set()
