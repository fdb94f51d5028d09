"""Analysis of how a model class's forward computes its loss, based on its source code."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

from shardformer.utils.source import syntax_of

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
    """Return whether `forward` reads an attribute, written as `expression`, such as "self.config.pad_token_id"."""
    found = (node for node in ast.walk(_tree(forward)) if isinstance(node, ast.Attribute))
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
