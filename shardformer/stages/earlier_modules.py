"""Placeholders for modules of earlier stages of which later stages need more than the hidden state.

`MetaModule` computes the shapes that the model's code between modules sees, for models that change the shape of the
hidden state. `KeptOutput` returns the output of the module, which travels with the message.

Inputs of the module around the layers that it reads between them, such as features of images for its first layers.

Modules of the first stage make them (DeepStack, arXiv 2406.04334: the features of a tower's layers are added to the
hidden states behind the first layers of text). They travel with the hidden state, and their gradients back. Features
that are [tokens, hidden] travel as [batch, seq, hidden]: the number of tokens may change from batch to batch, and the
shapes of a message may not. A stage receives those of its own and of later layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shardformer.stages.placeholders import Key, LayerInputs, StageInput, StagePlaceholder
from shardformer.utils.module_paths import by_layer, mask_among, spread

_MAX_SHAPES = 64  # combinations of input shapes that are remembered


class MetaModule(StagePlaceholder):
    """Placeholder for a module of an earlier stage; returns dummies in the shapes of the module's outputs.

    A copy of the module runs on the meta device, once for each combination of input shapes. Numbers that the module
    returns (height and width of a grid) are right. The dummies are NaN: should a later layer read one, the loss is NaN
    instead of wrong.
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


class FeaturesByLayer(dict[int, Tensor]):
    """Received features: number of a layer -> tensor. It is read like a list, too: earlier layers have 0-d zeros."""

    def __len__(self) -> int:
        """Return the length of a list that ends with the last entry."""
        return max(self, default=-1) + 1

    def __missing__(self, number: int) -> Tensor:
        """Return zero (0-d), which adds nothing to hidden states that earlier stages have left behind."""
        return next(iter(self.values())).new_zeros(())


def keys_between(names: Collection[str], layers: range) -> list[Key]:
    """Return names of tensors in a message's order; `layers`: numbers of this stage's and later layers."""
    return [(name, "") for name in names] + [(name, str(number)) for number in layers for name in names]


def exchange_inputs(runner: nn.Module, names: Sequence[str], stage_input: StageInput) -> None:
    """Let `runner`, the module around the layers, keep its inputs `names` on the first stage and read them on others.

    Those that are neither tensors nor lists or dictionaries with a tensor for each layer are the same on every stage.
    """
    inputs = LayerInputs(runner)

    def exchange(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if stage_input.hidden is None:
            given = {name: value for name in names if (value := inputs.get(name, args, kwargs)) is not None}
            stage_input.kept.update(_tensors_of(given))
        else:
            for name, value in _received(names, stage_input.kept).items():
                args, kwargs = inputs.put(name, value, args, kwargs)
        return args, kwargs

    runner.register_forward_pre_hook(exchange, with_kwargs=True)


def _tensors_of(given: Mapping[str, Any]) -> dict[Key, Tensor]:
    mask = mask_among(given.values())
    found: dict[Key, Tensor] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            found[name, ""] = value
        for number, features in by_layer(value).items():
            is_packed = mask is not None and features.dim() == 2
            found[name, str(number)] = spread(features, mask) if is_packed else features
    return found


def _received(names: Sequence[str], kept: Mapping[Key, Tensor | None]) -> dict[str, Any]:
    # Copies: models may change an input in place, and later stages get it as it was.
    found: dict[str, Any] = {name: each.clone() for name in names if (each := kept.get((name, ""))) is not None}
    mask = mask_among(found.values())
    for name in names:
        tensors = {
            int(number): each for (of, number), each in kept.items() if of == name and number and each is not None
        }
        is_packed = mask is not None and all(each.shape[:-1] == mask.shape for each in tensors.values())
        if tensors:
            found[name] = FeaturesByLayer(
                {at: each[mask] if is_packed else each.clone() for at, each in tensors.items()}
            )
    return found
