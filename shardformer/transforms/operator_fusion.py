"""Fused operators in the modules of a model, found by what their forwards do and not by the names of families.

Two rules. An activation that reads exactly what a linear layer returns adds that layer's bias. A forward whose
statements are those of a known block (a gated feed-forward, the end of a layer) is replaced by the same block with
fused operators. The forwards are read as syntax trees, so a release of transformers that changes one only ends the
fusion there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from shardformer.layers import FusedLayerNorm, FusedRMSNorm
from shardformer.layers.fused_ops import bias_activation, dropout_add, gated
from shardformer.layers.parallel_module import ParallelModule, replicated_linear
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.derived_modules import carry_over, change_module, derive, hook_on, stored_weight, user_code
from shardformer.utils.module_paths import replace_module
from shardformer.utils.source import activated_linears, definer, parsed, statements_of

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


def fuse_operators(model: nn.Module, device_type: str) -> int:
    """Fuse operators in all modules of `model`, in place; return how many modules have changed.

    On a GPU only gated feed-forwards: a product adds its bias before it is written, and a dropout writes its mask with
    its result, so that the other operators move no byte less, and each call of compiled code costs time of the host.
    """
    count = 0
    on_gpu = device_type == "cuda"
    for module in list(model.modules()):
        if "forward" in vars(module) or any(isinstance(child, StagePlaceholder) for child in module.children()):
            continue
        if not on_gpu and any(map(_has_kind, module.children())):  # few modules have, so that few forwards are read
            for linear, activation in activated_linears(definer(type(module))):
                count += fuse_bias_activation(module, linear, activation)
        methods = _block_of(definer(type(module)))
        is_useful = methods is not None and (methods in _GATED or not on_gpu)
        if is_useful and methods.applies_to(module):
            change_module(model, module, lambda native, methods=methods: derive(native, methods))
            count += 1
    return count


def fuse_bias_activation(module: nn.Module, linear: str, activation: str) -> bool:
    """Let the activation after a linear layer of `module` add that layer's bias; return whether it does now."""
    native = getattr(module, activation, None)
    kind = activation_kind(_first_of(native))
    if kind is None or not _leave_bias_out(module, linear):
        return False
    fused = _BiasActivation(getattr(module, linear), kind)
    setattr(module, activation, fused if _first_of(native) is native else nn.Sequential(fused, *native[1:]))
    return True


def _has_kind(child: nn.Module) -> bool:
    return activation_kind(_first_of(child)) is not None


def _first_of(activation: Any) -> Any:
    """Return an activation itself, or the one that is followed by the dropout of its region."""
    is_followed = isinstance(activation, nn.Sequential) and len(activation) > 0
    return activation[0] if is_followed else activation


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
        return self.LayerNorm(dropout_add(found, input_tensor, self.dropout, self.dense.bias))

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        return hook_on(module.dropout) is None and _leave_bias_out(module, "dense")


class _FusedOutput(nn.Module):
    """End of a layer of RoBERTa-PreLayerNorm: linear, dropout, then the sum with the block's input."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return dropout_add(self.dense(hidden_states), input_tensor, self.dropout, self.dense.bias)

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


_GATED = (_FusedGatedMLP, _FusedHalves, _FusedChatGLM)
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


@cache
def _block_of(cls: type) -> Any:
    """Return the methods that fuse a class whose forward is that of a known block; None for another class."""
    statements = statements_of(cls)
    return next((methods for text, methods in _BLOCKS.items() if parsed(text) == statements), None)


_NORMALISED = (
    "input_dtype = hidden_states.dtype; hidden_states = hidden_states.to(torch.float32); "
    "variance = hidden_states.pow(2).mean(-1, keepdim=True); "
    "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon); "
)
_RMS_NORM = (  # of Llama, and of OLMo 2
    f"{_NORMALISED}return self.weight * hidden_states.to(input_dtype)",
    f"{_NORMALISED}return (self.weight * hidden_states).to(input_dtype)",
)
_OFFSET_RMS_NORM = (  # of Gemma: weights start at 0
    "output = self._norm(x.float()); output = output * (1.0 + self.weight.float()); return output.type_as(x)",
)


def fuse_norms(model: nn.Module) -> None:
    """Replace the norms of `model` whose classes compute a layer norm or a known RMS norm, in place."""
    for path, module in list(model.named_modules()):
        new = _fused(module)
        if new is not None and user_code(module) is None:
            carry_over(module, new)
            replace_module(model, path, new)


def _fused(module: nn.Module) -> ParallelModule | None:
    if type(module) is nn.LayerNorm:
        return FusedLayerNorm(module) if module.weight is not None else None
    offset = _offset_of(definer(type(module))) if stored_weight(module) is not None else None
    return FusedRMSNorm(module, offset) if offset is not None else None


@cache
def _offset_of(cls: type) -> float | None:
    """Return what a known RMS norm adds to its weight; None for another class."""
    statements = statements_of(cls)
    if statements in map(parsed, _RMS_NORM):
        return 0.0
    return 1.0 if statements in map(parsed, _OFFSET_RMS_NORM) else None
