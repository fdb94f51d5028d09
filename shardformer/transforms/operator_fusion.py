"""Fused operators in the modules of a model, found by what their forwards do and not by the names of families.

Two rules. An activation that reads exactly what a linear layer returns adds that layer's bias. A forward whose
statements are those of a known block (a gated feed-forward, the end of a layer) is replaced by the same block with
fused operators. The forwards are read as syntax trees, so a release of transformers that changes one only ends the
fusion there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from shardformer.layers.fused_ops import bias_activation, bias_dropout_add, dropout_add, gated
from shardformer.layers.replicated_linear import replicated_linear
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.customizations import hook_on
from shardformer.utils.derived_modules import change_module, derive

_KINDS = {
    "NewGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "QuickGELUActivation": "quick",
    "BloomGelu": "bloom",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
_GATES = ("silu", "none", "tanh")


def fuse_operators(model: nn.Module) -> int:
    """Fuse operators in all modules of `model`, in place; return how many modules have changed."""
    count = 0
    for module in list(model.modules()):
        if "forward" in vars(module) or any(isinstance(child, StagePlaceholder) for child in module.children()):
            continue
        for linear, activation in _activated_linears(_definer(type(module))):
            count += fuse_bias_activation(module, linear, activation)
        methods = _block_of(_definer(type(module)))
        if methods is not None and methods.applies_to(module):
            change_module(model, module, lambda native, methods=methods: derive(native, methods))
            count += 1
    return count


def fuse_bias_activation(module: nn.Module, linear: str, activation: str) -> bool:
    """Let the activation after a linear layer of `module` add that layer's bias; return whether it does now."""
    native = getattr(module, activation, None)
    is_followed = isinstance(native, nn.Sequential) and len(native) > 0  # by the dropout of its region
    kind = activation_kind(native[0] if is_followed else native)
    if kind is None or not _leave_bias_out(module, linear):
        return False
    fused = _BiasActivation(getattr(module, linear), kind)
    setattr(module, activation, nn.Sequential(fused, *native[1:]) if is_followed else fused)
    return True


def activation_kind(activation: Any) -> str | None:
    """Return the kind of an activation in `fused_ops`; None for another one, or one with hooks."""
    if not isinstance(activation, nn.Module) or hook_on(activation) is not None:
        return None
    name = type(activation).__name__
    if name in ("GELUActivation", "GELU"):
        return getattr(activation, "approximate", "none")
    return _KINDS.get(name)


class _BiasActivation(nn.Module):
    """activation(x + bias) with the bias of a linear layer, which stays that layer's parameter."""

    def __init__(self, linear: nn.Module, kind: str) -> None:
        super().__init__()
        self.__dict__["linear"] = linear  # not a submodule: its parameters must have one name
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return bias_activation(x, self.linear.bias, self.kind)


def _leave_bias_out(module: nn.Module, name: str) -> bool:
    """Let a linear layer of `module` return its product without the bias, which the consumer adds.

    Returns:
        False if that cannot be: the layer has no bias, a forward of its own or hooks, or the bias is left out already.
    """
    native = getattr(module, name, None)
    if not isinstance(native, nn.Module) or hook_on(native) is not None:
        return False
    layer = native if hasattr(native, "adds_bias") else replicated_linear(native)
    if layer is None or layer.bias is None or not layer.adds_bias:
        return False
    setattr(module, name, layer)
    layer.adds_bias = False
    return True


# ----- blocks whose whole forward is replaced -----


class _FusedGatedMLP(nn.Module):
    """Feed-forward of Llama."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), activation_kind(self.act_fn)))

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        return activation_kind(module.act_fn) in _GATES


class _FusedHalves(nn.Module):
    """Feed-forward of Phi-3 and GLM: gate and value are halves of one projection."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, value = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(gated(gate, value, activation_kind(self.activation_fn)))

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        return activation_kind(module.activation_fn) in _GATES


class _FusedChatGLM(nn.Module):
    """Feed-forward of ChatGLM2."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, value = self.dense_h_to_4h(hidden_states).chunk(2, dim=-1)
        return self.dense_4h_to_h(gated(gate, value, "silu"))

    @staticmethod
    def applies_to(_: nn.Module) -> bool:
        return True


class _FusedNormedOutput(nn.Module):
    """End of a layer of BERT: linear, dropout, then the norm of the sum with the block's input."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        found = self.dense(hidden_states)
        return self.LayerNorm(bias_dropout_add(found, self.dense.bias, input_tensor, self.dropout))

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        return hook_on(module.dropout) is None and _leave_bias_out(module, "dense")


class _FusedOutput(nn.Module):
    """End of a layer of RoBERTa-PreLayerNorm: linear, dropout, then the sum with the block's input."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return bias_dropout_add(self.dense(hidden_states), self.dense.bias, input_tensor, self.dropout)

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        return hook_on(module.dropout) is None and _leave_bias_out(module, "dense")


class _FusedT5Layer(nn.Module):
    """Feed-forward layer of T5: norm, feed-forward, dropout, then the sum with the layer's input."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return dropout_add(self.DenseReluDense(self.layer_norm(hidden_states)), hidden_states, self.dropout)

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        return hook_on(module.dropout) is None


_LINEAR_DROPOUT = "hidden_states = self.dense(hidden_states); hidden_states = self.dropout(hidden_states); "
_BLOCKS: dict[str, type] = {
    "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)); return down_proj": _FusedGatedMLP,
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))": _FusedGatedMLP,
    "up_states = self.gate_up_proj(hidden_states); gate, up_states = up_states.chunk(2, dim=-1); "
    "up_states = up_states * self.activation_fn(gate); return self.down_proj(up_states)": _FusedHalves,
    "gate, value = self.dense_h_to_4h(hidden_states).chunk(2, dim=-1); "
    "return self.dense_4h_to_h(F.silu(gate) * value)": _FusedChatGLM,
    _LINEAR_DROPOUT + "hidden_states = self.LayerNorm(hidden_states + input_tensor); "
    "return hidden_states": _FusedNormedOutput,
    _LINEAR_DROPOUT + "hidden_states = hidden_states + input_tensor; return hidden_states": _FusedOutput,
    "forwarded_states = self.layer_norm(hidden_states); forwarded_states = self.DenseReluDense(forwarded_states); "
    "hidden_states = hidden_states + self.dropout(forwarded_states); return hidden_states": _FusedT5Layer,
}


# ----- reading forwards -----


def _definer(cls: type) -> type:
    """Return the class whose forward runs."""
    return next(each for each in cls.__mro__ if "forward" in vars(each))


@cache
def _block_of(cls: type) -> Any:
    """Return the methods that fuse a class whose forward is that of a known block; None for another class."""
    forward = next((each for each in _methods(cls) if each.name == "forward"), None)
    if forward is None or forward.decorator_list:
        return None
    return _known_blocks().get(_dump(forward.body))


@cache
def _known_blocks() -> dict[str, type]:
    return {_dump(ast.parse(text).body): methods for text, methods in _BLOCKS.items()}


def _dump(statements: list[ast.stmt]) -> str:
    return ";".join(ast.dump(each) for each in statements if not _is_text(each))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@cache
def _activated_linears(cls: type) -> tuple[tuple[str, str], ...]:
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
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # classes from a prompt, or in C
        return []
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return [each for each in body if isinstance(each, ast.FunctionDef) and each.name != "__init__"]
