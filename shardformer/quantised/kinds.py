"""Detection of quantised weights, by the classes of libraries that are imported already."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardformer.quantised.eight_bit import EightBit, scales_of
from shardformer.quantised.four_bit import FourBit
from shardformer.quantised.torchao import TorchaoInt8
from shardformer.quantised.weight import QuantisedWeight
from shardformer.utils.customizations import is_quantised

KINDS: tuple[QuantisedWeight, ...] = (FourBit(), EightBit(), TorchaoInt8())


def kind_of_layer(module: nn.Module) -> QuantisedWeight | None:
    """Return the kind of weight of a native quantised linear layer that can be cut; None for any other module."""
    return next((kind for kind in KINDS if kind.accepts(module)), None)


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
        kernel = getattr(module, "kernel", None)
        kind = kernel if isinstance(kernel, QuantisedWeight) else kind_of_layer(module)
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
