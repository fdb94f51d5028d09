"""Placeholders for modules that other pipeline stages hold, and the message that travels between stages.

All placeholders of a model share one `StageInput`. The received hidden state is put in front of the first layer of the
stage. Whatever the model computes before that layer (masks from shapes, scaled embeddings, norms) only needs its shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardformer.utils.outer_call import call_through

StageMessage = tuple[Tensor | None, ...]


class StageInput:
    """What comes from the stage before and what the next one gets, in the pass in progress.

    Attributes:
        hidden: the hidden state of the layers, [batch, seq, hidden].
        carried: further inputs of the layers, by name.
        kept: outputs of modules that are finished, (path, field) -> value.
    """

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.carried: dict[str, Tensor | None] = {}
        self.kept: dict[tuple[str, str], Tensor | None] = {}

    def begin(
        self, message: StageMessage | None, carried_inputs: Sequence[str] = (), keeps: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Take a received message: the hidden state, then `carried_inputs` and `keeps`; None on the first stage."""
        self.hidden, self.carried, self.kept = None, {}, {}
        if message is None:
            return
        self.hidden, *rest = message
        self.carried = dict(zip(carried_inputs, rest[: len(carried_inputs)], strict=True))
        self.kept = dict(zip(keeps, rest[len(carried_inputs) :], strict=True))

    def dummy(self) -> Tensor:
        """A tensor of the hidden state's shape, of its own: some models scale embeddings in place."""
        return torch.zeros(()) if self.hidden is None else torch.zeros_like(self.hidden)


class StageBoundary(Exception):
    """Ends the forward pass of a stage; carries what the next stage receives."""

    def __init__(self, message: StageMessage) -> None:
        super().__init__("end of the pipeline stage")
        self.message = message


class LayerInputs:
    """Finds the inputs of a layer by name, wherever the caller put them."""

    def __init__(self, layer: nn.Module) -> None:
        self.names = list(inspect.signature(layer.forward).parameters)

    def get(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        index = self.names.index(name)
        return args[index] if index < len(args) else kwargs.get(name)

    def put(self, name: str, value: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        index = self.names.index(name)
        if index < len(args):
            return (*args[:index], value, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: value}


class StagePlaceholder(nn.Module):
    """Stands for a module that lives on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stage_input = StageInput()

    @property
    def weight(self) -> Tensor:
        """For models that ask a module that is elsewhere for its dtype or device."""
        return self.stage_input.dummy()

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden state."""
        return self.stage_input.dummy().dtype

    @property
    def device(self) -> torch.device:
        """Of the hidden state."""
        return self.stage_input.dummy().device


class Received(StagePlaceholder):
    """Stands for an embedding on a later stage: returns a hidden state of the right shape."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stage_input.dummy()


class ReceivedPatches(Received):
    """Stands for the embedding of images; the model also asks its projection for the dtype that pixels should have."""

    patch_embeddings = SimpleNamespace(projection=SimpleNamespace(weight=torch.empty(0)))


class ReceivedUnpadded(StagePlaceholder):
    """Stands for an embedding whose output the model pads to whole blocks: what arrived is padded already."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dummy = self.stage_input.dummy()
        return dummy if dummy.dim() == 0 else dummy.new_zeros(*ids.shape, dummy.shape[-1])


class ReceivedByTower(StagePlaceholder):
    """Stands for an embedding in front of a tower that may be finished: then it fits what the tower returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        kept = next((value for value in self.stage_input.kept.values() if value is not None), None)
        return self.stage_input.dummy() if kept is None else kept.detach()


class ZeroEmbedding(StagePlaceholder):
    """Stands for an embedding that is added to another: its share is already in what arrived."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


class IdentityPlaceholder(StagePlaceholder):
    """Stands for a module that an earlier stage has already applied (an embedding's norm or dropout)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class LayerInputPlaceholder(StagePlaceholder):
    """Stands for the last part of the layer before a stage's first one: returns what arrived, a tensor of its own."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if self.stage_input.hidden is None else self.stage_input.hidden.clone()


class CachedTower(StagePlaceholder):
    """Stands for a whole tower (an encoder) that earlier stages have run: returns what it returned there."""

    def __init__(self, path: str, fields: Sequence[str]) -> None:
        super().__init__()
        self.path, self.fields = path, tuple(fields)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        # What no layer reads any more only has to have a shape.
        kept = {field: self.stage_input.kept.get((self.path, field)) for field in ("last_hidden_state", *self.fields)}
        dummy = self.stage_input.dummy()
        return BaseModelOutputWithPooling(**{field: dummy if value is None else value for field, value in kept.items()})


class Skipped(StagePlaceholder):
    """Stands for a layer of an earlier stage; `num_outputs` elements of a tuple, or 0 for the bare hidden state.

    What is carried follows the hidden state, because models ask whether there is any.
    """

    def __init__(self, num_outputs: int, carried_inputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.num_outputs, self.carried_inputs = num_outputs, tuple(carried_inputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else next(iter(kwargs.values()))
        if not self.num_outputs:
            return hidden_states
        carried = [self.stage_input.carried.get(name) for name in self.carried_inputs]
        return (hidden_states, *carried, *[None] * (self.num_outputs - 1 - len(carried)))


class Boundary(StagePlaceholder):
    """Stands for the first layer of the next stage: ends the pass with what that stage needs."""

    def __init__(self, layer: nn.Module, carried_inputs: Sequence[str], keeps: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.inputs, self.carried_inputs, self.keeps = LayerInputs(layer), tuple(carried_inputs), tuple(keeps)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        hidden = self.inputs.get(self.inputs.names[0], args, kwargs)
        carried = [self.inputs.get(name, args, kwargs) for name in self.carried_inputs]
        raise StageBoundary((hidden, *carried, *[self.stage_input.kept.get(key) for key in self.keeps]))


class UnreachablePlaceholder(StagePlaceholder):
    """Stands for a module of another stage that this stage's pass never reaches."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this module lives on another pipeline stage; its family's StageLayout lets a pass reach it")


def enter_at(layer: nn.Module, stage_input: StageInput, carried_inputs: Sequence[str]) -> None:
    """Let `layer`, the first that a stage runs, read what arrived: the hidden state and the carried inputs.

    Outside of its hooks, which run inside of activation checkpointing, where a recomputation would read what arrived
    for another micro-batch.
    """
    inputs = LayerInputs(layer)

    def read(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        values = {inputs.names[0]: stage_input.hidden, **{name: stage_input.carried[name] for name in carried_inputs}}
        for name, value in values.items():
            args, kwargs = inputs.put(name, value, args, kwargs)
        return call(*args, **kwargs)

    call_through(layer, read)


def keep_output(module: nn.Module, path: str, fields: Sequence[str], stage_input: StageInput) -> None:
    """Remember the fields of the output of `module`, which stages behind it need."""

    def remember(_: nn.Module, __: tuple, output: Any) -> None:
        for field in fields:
            stage_input.kept[path, field] = output[field]

    module.register_forward_hook(remember)
