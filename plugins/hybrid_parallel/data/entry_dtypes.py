"""Dtypes of the floating-point entries of a batch: what a loss reads keeps its own, what layers multiply is cast.

A batch does not say which entries are labels, rewards or weights, and some models reconstruct their own images. So
nothing is cast ahead of the model: a layer in 16 bits casts an input whose dtype it would refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from shardformer.layers.norm import FusedLayerNorm
from shardformer.matmul.native import MatmulLayer

_SHORT = (torch.bfloat16, torch.float16)
# Layers that take inputs of the dtype of their weights alone. An RMS norm multiplies in the wider dtype of the two.
_LAYERS = (
    *(nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, MatmulLayer),
    *(nn.LayerNorm, nn.GroupNorm, _NormBase, nn.PReLU, FusedLayerNorm),
)
# Losses that take inputs of one dtype alone: their backward pass raises for two; the first one's until torch 2.12.
_LOSSES = (F.mse_loss, F.huber_loss, F.binary_cross_entropy)
# Entries that stand for what a model computes itself: they have the dtype of its activations.
_ACTIVATIONS = (
    *("inputs_embeds", "decoder_inputs_embeds", "encoder_hidden_states"),
    *("attention_mask", "decoder_attention_mask", "encoder_attention_mask", "cross_attention_mask"),
)


def dtype_of_values(module: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of most values of a module's parameters; fp32 if it has none."""
    sizes: Counter[torch.dtype] = Counter()
    for param in module.parameters():
        if param.is_floating_point():
            sizes[param.dtype] += param.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def has_floats(value: Any) -> bool:
    """Return whether an entry of a batch is, or holds, a floating-point tensor."""
    if isinstance(value, Mapping):
        return any(map(has_floats, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_floats, value))
    return isinstance(value, Tensor) and value.is_floating_point()


# ----- inputs -----


def cast_inputs(modules: Iterable[nn.Module], model: nn.Module, dtype: torch.dtype) -> None:
    """Have the layers among a model's modules, if their weights have 16 bits, cast inputs of another dtype.

    Models of transformers cast what stands for their activations; one inside of another may be given embeddings that
    are made of entries. Of a layer class of the user's own, which has a matrix `weight`, the first input is cast. What
    a module multiplies by a parameter outside of any layer is left as in plain PyTorch.

    Args:
        dtype: of the model's activations.
    """
    for layer in modules:
        is_known = isinstance(layer, _LAYERS) or type(layer).__name__ == "Conv1D"
        param = next(layer.parameters(), None) if is_known or (layer is not model and _is_users_layer(layer)) else None
        if param is not None and param.dtype in _SHORT:
            layer.register_forward_pre_hook(partial(_cast_inputs, param.dtype, is_known), with_kwargs=True)
        elif dtype in _SHORT and hasattr(layer, "get_input_embeddings"):
            layer.register_forward_pre_hook(partial(_cast_activations, dtype), with_kwargs=True)


def _is_users_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer of a class of the user's own; those of transformers cast what they must."""
    weight = module._parameters.get("weight")
    is_leaf = weight is not None and weight.dim() > 1 and not module._modules
    return is_leaf and not type(module).__module__.startswith("transformers.")


def _cast_inputs(
    dtype: torch.dtype, all_of_them: bool, layer: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    if not all_of_them:
        return (*_in_dtype(args[:1], dtype), *args[1:]), kwargs
    return _in_dtype(args, dtype), {name: _in_dtype(each, dtype) for name, each in kwargs.items()}


def _cast_activations(
    dtype: torch.dtype, model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    return args, {name: _in_dtype(each, dtype) if name in _ACTIVATIONS else each for name, each in kwargs.items()}


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if type(value) is tuple:  # arguments, and the states of an LSTM
        return tuple(_in_dtype(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


# ----- losses -----


class LossesPromote(TorchFunctionMode):
    """A context in which losses that take inputs of one dtype alone compute in the widest of those that they get."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if function in _LOSSES:
            dtypes = [each.dtype for each in (*args, *kwargs.values()) if has_floats(each)]
            dtype = reduce(torch.promote_types, dtypes)
            args, kwargs = _in_dtype(args, dtype), {name: _in_dtype(each, dtype) for name, each in kwargs.items()}
        return function(*args, **kwargs)
