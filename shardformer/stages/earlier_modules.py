"""Placeholders for modules of earlier stages of which later stages need more than the hidden state.

`MetaModule` computes the shapes that the model's code between modules sees, for models that change the shape of the
hidden state. `KeptOutput` returns the output of the module, which travels with the message.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shardformer.stages.placeholders import StageInput, StagePlaceholder

_MAX_SHAPES = 64  # combinations of input shapes that are remembered


class MetaModule(StagePlaceholder):
    """Placeholder for a module of an earlier stage; returns dummies in the shapes of the module's outputs.

    A copy of the module runs on the meta device, once for each combination of input shapes. Numbers that the module
    returns (height and width of a grid) are right. The dummies are NaN: should a later layer read one, the loss is NaN
    instead of wrong.

    Args:
        module: the full module, not yet sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tensors = [*module.parameters(), *module.buffers()]
        copies = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
        # In a tuple, because a sub-module's parameters would belong to the model.
        self._copy = (copy.deepcopy(module, copies),)
        self._outputs: dict[Any, Any] = {}
        self._parts: dict[str, MetaModule] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the copy: models read the dtype of a patch embedding inside of it.

        A sub-module is one of these placeholders, as a model may call it by itself (Kosmos-2: a norm of its tower).
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_parts" not in self.__dict__:  # before the end of __init__
                raise
        if name not in self._parts:
            found = getattr(self._copy[0], name)
            if not isinstance(found, nn.Module):
                return found
            self._parts[name] = MetaModule(found)
            self._parts[name].stage_input = self.stage_input
        return self._parts[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return values in the shapes of the module's outputs, floating-point ones in the dtype of the hidden state."""
        leaves, structure = tree_flatten((args, kwargs))
        key = (str(structure), *(_signature(leaf) for leaf in leaves))
        if key not in self._outputs:
            if len(self._outputs) >= _MAX_SHAPES:
                self._outputs.clear()
            self._outputs[key] = self._run(args, kwargs)
        hidden = self.stage_input.hidden
        devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)] + [self.device]
        dtype = None if hidden is None else hidden.dtype

        def dummy(output: Tensor) -> Tensor:
            kept = output.dtype if dtype is None or not output.is_floating_point() else dtype
            return torch.full(output.shape, torch.nan if kept.is_floating_point else 0, dtype=kept, device=devices[0])

        return tree_map_only(Tensor, dummy, self._outputs[key])

    def _run(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        module = self._copy[0]
        parameter = next(module.parameters(), None)

        def to_meta(tensor: Tensor) -> Tensor:
            is_cast = parameter is not None and tensor.is_floating_point()
            return tensor.detach().to("meta", parameter.dtype if is_cast else tensor.dtype)

        with torch.no_grad(), torch.device("meta"), _no_autocast(), _ChecksPass():
            args, kwargs = tree_map_only(Tensor, to_meta, (args, dict(kwargs)))
            kwargs = {name: _no_cache(value) for name, value in kwargs.items()}
            # Not called: a stage of the same rank may start with the module, whose calls then read what arrived.
            return module.forward(*map(_no_cache, args), **kwargs)


class _ChecksPass(TorchFunctionMode):
    """Lets modules check their inputs on the meta device, where a condition has no value: it holds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.item, Tensor.__bool__) and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _no_cache(value: Any) -> Any:
    """Return None for a cache of keys and values, whose tensors are not on the meta device; else the value."""
    return None if hasattr(value, "get_seq_length") else value


class ReceivedOutput(MetaModule):
    """Placeholder for the layer before a stage; returns the received hidden state in the form of the layer's output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer with the received hidden state as its only tensor."""
        return tree_map_only(Tensor, lambda _: self.stage_input.hidden, super().forward(*args, **kwargs))


def _signature(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


class KeptOutput(StagePlaceholder):
    """Placeholder for a module of an earlier stage; returns the received output of the module.

    Args:
        path: path of the module in the base model.
        count: number of tensors in the output of the module; 0 for a bare tensor.
        module: the full module, if its output is not a tuple of tensors, or models read attributes of its parts (the
            dtype of DINOv3's patch embedding); its structure is computed on the meta device.
    """

    def __init__(self, path: str, count: int, module: nn.Module | None = None) -> None:
        super().__init__()
        self.path, self.count = path, count
        self._module = () if module is None else (MetaModule(module),)
        self._shapes = self._module if count else ()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the full module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self.__dict__.get("_module"):
                raise
        return getattr(self._module[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received output; a dummy before the first message."""
        # Copies: models add to the output of a module in place, and later stages get it as it was.
        kept = [_copied(self.stage_input.kept.get(key)) for key in output_keys(self.path, self.count)]
        if not self._shapes:
            return tuple(kept) if self.count else kept[0]
        received = iter(kept)
        return tree_map_only(Tensor, lambda _: next(received), self._shapes[0](*args, **kwargs))


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def output_keys(path: str, count: int) -> list[tuple[str, str]]:
    """Return the keys in `StageInput.kept` of the tensors that the module at `path` returns."""
    return [(path, str(index)) for index in range(max(count, 1))]


def keep_tensors(module: nn.Module, path: str, count: int, stage_input: StageInput) -> None:
    """Register a hook that stores the tensors that `module` returns for later stages."""

    def remember(_: nn.Module, __: tuple, output: Any) -> None:
        tensors = [leaf.clone() for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        stage_input.kept.update(zip(output_keys(path, count), tensors, strict=True))

    module.register_forward_hook(remember)
