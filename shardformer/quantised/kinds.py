"""Detection of quantised weights, by the classes of libraries that are imported already."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardformer.quantised.eight_bit import EightBit, scales_of
from shardformer.quantised.four_bit import FourBit
from shardformer.quantised.torchao import TorchaoInt8
from shardformer.quantised.weight import QuantisedWeight

_BITSANDBYTES = "bitsandbytes.nn.modules"
_KINDS: tuple[tuple[str, str, QuantisedWeight], ...] = (
    ("Linear4bit", "Params4bit", FourBit()),
    ("Linear8bitLt", "Int8Params", EightBit()),
)
_TORCHAO_INT8 = TorchaoInt8()


def kind_of_layer(module: nn.Module) -> QuantisedWeight | None:
    """Return the kind of weight of a native quantised linear layer that can be cut; None for any other module."""
    library = sys.modules.get(_BITSANDBYTES)
    for layer, _, kind in _KINDS if library is not None else ():
        if isinstance(module, getattr(library, layer)):
            return kind
    stored = module._parameters.get("weight")  # to read a parametrized weight may change it
    return _TORCHAO_INT8 if isinstance(module, nn.Linear) and _is_torchao_int8(stored) else None


def is_quantised(parameter: Tensor | None) -> bool:
    """Return whether a parameter is quantised: packed, or stored in few bits together with scales."""
    if not isinstance(parameter, nn.Parameter):
        return False
    library = sys.modules.get(_BITSANDBYTES)
    if library is not None and isinstance(parameter, tuple(getattr(library, each) for _, each, _ in _KINDS)):
        return True
    return parameter.dtype in (torch.uint8, torch.int8) or type(parameter).__module__.startswith("torchao.")


def quantised_name(model: nn.Module) -> str | None:
    """Return the name of the first quantised parameter of a model; None if it has none."""
    return next((name for name, parameter in model.named_parameters() if is_quantised(parameter)), None)


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, QuantisedWeight]]:
    """Yield path, module and kind of the native quantised linear layers of a model."""
    for path, module in model.named_modules():
        kind = kind_of_layer(module)
        if kind is not None:
            yield path, module, kind


def packed_layers(model: nn.Module) -> Iterator[tuple[nn.Module, QuantisedWeight]]:
    """Yield module and kind of the quantised linear layers of a model, native ones and shards."""
    for module in model.modules():
        kind = getattr(module, "quantised", None) or kind_of_layer(module)
        if kind is not None and is_quantised(module.weight):  # and no part of an adapter that is like such a layer
            yield module, kind


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all values of a whole model: parameters, buffers, scales of quantised weights.

    Parameters of a tensor subclass that has no values of its own (torchao) are given by the tensors inside of them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(tensor):
            yield from ((f"{name}.{part}", getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
        else:
            yield name, tensor
    for path, module, kind in quantised_layers(model):
        if isinstance(kind, EightBit):
            yield f"{path}.SCB", scales_of(module)
        if not isinstance(kind, FourBit):
            continue
        state = module.weight.quant_state
        tensors = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
        if state.nested:
            tensors |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        yield from ((f"{path}.weight.{name}", tensor) for name, tensor in tensors.items() if tensor is not None)


def _is_torchao_int8(weight: Tensor | None) -> bool:
    return type(weight).__name__ == "Int8Tensor" and type(weight).__module__.startswith("torchao.")
