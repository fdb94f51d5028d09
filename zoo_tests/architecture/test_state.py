"""State of the library lies in objects: nothing at the top of a module changes while a job runs.

The exceptions, each with its reason, are in `ALLOWED`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from zoo_tests.architecture.sources import LIBRARY, files_of, named, tree_of

MUTATING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
    *("remove", "reverse", "set", "setdefault", "sort", "update"),
}
# "file:name" -> why this state belongs to the process.
ALLOWED = {
    "booster/failure/hooks.py:_Process": "hooks of the interpreter, and the monitor that they report to",
    "booster/integrations/replicas.py:_replicas": "torchmetrics' own functions take no layout",
    "booster/integrations/replicas.py:_has_all_samples": "set by a context manager",
    "booster/failure/stack_probe.py:_WAITING_CODE": "filled by a decorator, when modules are imported",
    "plugins/hybrid_parallel/compat/deepspeed_3d/patches.py:_reading": "a ContextVar: set by a context manager",
    "plugins/hybrid_parallel/distributed/local_ranks.py:_of_thread": "of a thread: torch's functions take no world",
    "plugins/hybrid_parallel/reproducible/batch_invariance.py:_SAME": "what is known of the kernels of the process",
    "plugins/hybrid_parallel/verify/layout_check.py:_of_thread": "of a thread: a loss knows neither rank nor step",
    "plugins/hybrid_parallel/setup/input_checks.py:_BOOSTED": "weak: models of the script that `boost` has changed",
    "shardformer/distributed/atorch.py:PROCESS_STATE": "ATorch's own functions take no object",
    "shardformer/cross_entropy/fused_linear.py:_State": "set by a context manager",
    "shardformer/distributed/blocks.py:_BLOCKS_OF": "released with the process group that it describes",
    "shardformer/distributed/process_groups.py:_OF_WORLD": "released with torch's default process group",
    "shardformer/lazy/recording.py:_is_recording": "a ContextVar: set by a context manager",
    "shardformer/transforms/sequences.py:_running": "a ContextVar: set by hooks around a forward pass",
    "shardformer/matmul/kernel.py:_Plan": "set by a context manager",
    "shardformer/matmul/float8.py:_KERNELS": "weak: operators of graphs take names, not objects",
    "shardformer/utils/untraced.py:_OPERATORS": "filled by a decorator, when modules are imported",
    "shardformer/utils/untraced.py:saved_results": "a ContextVar: set by a context manager",
    "shardformer/utils/untraced.py:_UNTRACED": "filled by a decorator, when modules are imported",
    "shardformer/utils/untraced.py:_CONSTANT": "filled by a decorator, when modules are imported",
    "shardformer/policies/registry.py:_REGISTERED": "what users register, before they build a plugin",
}


def names_at_top(tree: ast.Module) -> Iterator[str]:
    """What a module assigns, and its classes: those can hold state too."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def changed_in(function: ast.AST) -> Iterator[ast.AST]:
    """Expressions whose value changes: of `a.b[c] = d` and `a.b.append(d)`, `a.b`; and what is declared global."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from (ast.Name(name) for name in node.names)
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            yield node.func.value


def root_of(expression: ast.AST) -> str | None:
    """`a` of `a`, `a.b` and `a[b].c`."""
    while isinstance(expression, ast.Attribute | ast.Subscript):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else None


def state_in(tree: ast.Module) -> set[str]:
    """Names at the top of a module that its functions change."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    changed = {root_of(expression) for function in functions for expression in changed_in(function)}
    return changed & set(names_at_top(tree))


def test_state_lies_in_objects() -> None:
    found = {f"{named(path)}:{name}" for path in files_of(*LIBRARY) for name in state_in(tree_of(path))}
    assert found - ALLOWED.keys() == set(), "hold it in an object that is passed in, or give a reason in ALLOWED"
    assert ALLOWED.keys() - found == set(), "no longer there: remove it from ALLOWED"


@pytest.mark.parametrize(
    "change",
    [
        "_x[0] = 1",
        "del _x[0]",
        "_x[0] += 1",
        "_x.append(1)",
        "_x.y.update(z=1)",
        "_x[0].y = 1",
        "_x.y: int = 1",
        "global _x",
        "def inner(): _x.clear()",
    ],
)
def test_a_change_is_found(change: str) -> None:
    assert state_in(ast.parse(f"_x = make()\ndef f():\n    {change}")) == {"_x"}
    assert state_in(ast.parse(f"class _x: y = 1\ndef f():\n    {change}")) == {"_x"}
    assert state_in(ast.parse(f"def f(_x):\n    {change}")) == set()


def test_what_is_read_or_local_is_no_state() -> None:
    read = "b = _x.copy()\n    b[_x[0]] = a.pop()\n    return _x[0]"
    assert state_in(ast.parse(f"_x = [1]\ndef f(a):\n    {read}")) == set()
