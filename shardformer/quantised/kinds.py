"""Detection of quantised weights, by the classes of libraries that are imported already."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import Tensor, nn

from shardformer.quantised.eight_bit import EightBit, scales_of
from shardformer.quantised.four_bit import FourBit
from shardformer.quantised.weight import QuantisedWeight

_BITSANDBYTES = "bitsandbytes.nn.modules"
_KINDS: tuple[tuple[str, str, QuantisedWeight], ...] = (
    ("Linear4bit", "Params4bit", FourBit()),
    ("Linear8bitLt", "Int8Params", EightBit()),
)


def kind_of_layer(module: nn.Module) -> QuantisedWeight | None:
    """Return the kind of weight of a native quantised linear layer that can be cut; None for any other module."""
    library = sys.modules.get(_BITSANDBYTES)
    for layer, _, kind in _KINDS if library is not None else ():
        if isinstance(module, getattr(library, layer)):
            return kind
    return None


def is_quantised(parameter: Tensor | None) -> bool:
    """Return whether a parameter is quantised: packed, or stored in few bits together with scales."""
    if not isinstance(parameter, nn.Parameter):
        return False
    library = sys.modules.get(_BITSANDBYTES)
    if library is not None and isinstance(parameter, tuple(getattr(library, each) for _, each, _ in _KINDS)):
        return True
    return not parameter.is_floating_point() or type(parameter).__module__.startswith("torchao.")


def quantised_name(model: nn.Module) -> str | None:
    """Return the name of the first quantised parameter of a model; None if it has none."""
    return next((name for name, parameter in model.named_parameters() if is_quantised(parameter)), None)


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, QuantisedWeight]]:
    """Yield path, module and kind of the native quantised linear layers of a model."""
    for path, module in model.named_modules():
        kind = kind_of_layer(module)
        if kind is not None:
            yield path, module, kind


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of what belongs to quantised weights of a whole model and is no parameter: the scales."""
    for path, module, kind in quantised_layers(model):
        if isinstance(kind, EightBit):
            yield f"{path}.SCB", scales_of(module)
            continue
        state = module.weight.quant_state
        tensors = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
        if state.nested:
            tensors |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        yield from ((f"{path}.weight.{name}", tensor) for name, tensor in tensors.items() if tensor is not None)
