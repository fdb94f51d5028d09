"""Placeholders for modules of other pipeline stages, and the message that is sent between stages.

All placeholders of a model share one `StageInput`. The received hidden state becomes the input of the first layer of
the stage. Everything the model computes before that layer (masks, scaled embeddings, norms) only needs its shape.

Dictionaries that layers write for later layers, such as the keys and values that several layers share.

A stage adds what earlier stages wrote to the dictionary of its own pass. A dictionary has known keys; each value is a
pair of tensors. See `StageLayout.shared_states`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardformer.distributed.blocks import Blocks, divided_by_heads, joined_blocks
from shardformer.utils.untraced import call_through

Name = str | int  # of an entry of a dictionary: a kind of layers, or the number of a layer
States = Mapping[str, Sequence[Name]]
Key = tuple[str, str]


def state_keys(states: States) -> list[Key]:
    """Return the names of all tensors of the dictionaries in the order of a message: (input, key and part)."""
    return [(name, f"{key}.{part}") for name, keys in states.items() for key in keys for part in (0, 1)]


def written(states: States, inputs: Mapping[str, Mapping[Name, tuple[Tensor, Tensor]]]) -> dict[Key, Tensor]:
    """Return the tensors that the dictionaries `inputs` hold so far."""
    return {
        (name, f"{key}.{part}"): tensor
        for name, keys in states.items()
        for key in keys
        if key in inputs[name]
        for part, tensor in enumerate(inputs[name][key])
    }


def add_received(
    states: States,
    inputs: Mapping[str, MutableMapping[Name, tuple[Tensor, Tensor]]],
    kept: Mapping[Key, Tensor | None],
) -> None:
    """Add the received tensors to the dictionaries `inputs`, in place: all later layers read the same objects."""
    for name, keys in states.items():
        for key in keys:
            first, second = (kept.get((name, f"{key}.{part}")) for part in (0, 1))
            if first is not None and second is not None:
                inputs[name][key] = (first, second)


StageMessage = tuple[Tensor | None, ...]


class StageInput:
    """The data of the current pass that is received from the previous stage or kept for the next one.

    Attributes:
        hidden: the received hidden state, [batch, seq, hidden]; None on the first stage.
        carried: further inputs of the layers, by name.
        kept: outputs of modules that have finished, (path, field) -> value.
        pass_number: number of the pass, or of the time between two passes.
        blocks, head_inputs: the blocks of the tensor-parallel axis, and the carried inputs that are divided into them
            by heads; None and nothing if a rank computes its heads at once.
    """

    blocks: Blocks | None = None
    head_inputs: Collection[str] = ()

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.carried: dict[str, Tensor | None] = {}
        self.kept: dict[tuple[str, str], Tensor | None] = {}
        self.pass_number = 0

    @property
    def is_running(self) -> bool:
        """Whether a pass is under way."""
        return self.pass_number % 2 == 1

    def begin(
        self, message: StageMessage | None, carried_inputs: Sequence[str] = (), keeps: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Unpack the hidden state, `carried_inputs` and `keeps` (padded by None); None (the first stage) clears all."""
        self.hidden, self.carried, self.kept = None, {}, {}
        self.pass_number += 1
        if message is None:
            return
        self.hidden, *rest = message
        self.carried = dict(zip(carried_inputs, rest[: len(carried_inputs)], strict=True))
        for name in self.head_inputs if self.blocks is not None else ():
            if self.carried.get(name) is not None:
                self.carried[name] = divided_by_heads(self.carried[name], self.blocks)
        kept = rest[len(carried_inputs) :]
        self.kept = dict(zip(keeps, [*kept, *[None] * (len(keeps) - len(kept))], strict=True))

    def dummy(self) -> Tensor:
        """Return a new NaN tensor like the hidden state: models may scale it in place, none may use it."""
        return torch.zeros(()) if self.hidden is None else torch.full_like(self.hidden, torch.nan)


class StageBoundary(Exception):
    """Exception that ends the forward pass of a stage and carries the message for the next stage."""

    def __init__(self, message: StageMessage) -> None:
        super().__init__("end of the pipeline stage")
        self.message = message


class LayerInputs:
    """Access to the inputs of a layer by name, whether they are passed by position or by keyword."""

    def __init__(self, layer: nn.Module) -> None:
        self.names = list(inspect.signature(layer.forward).parameters)

    def get(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Return the input called `name` of a call; None if it is not given."""
        index = self.names.index(name)
        return args[index] if index < len(args) else kwargs.get(name)

    def put(self, name: str, value: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call with another value of the input called `name`."""
        index = self.names.index(name)
        if index < len(args):
            return (*args[:index], value, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: value}


class _PartOfPlaceholder(SimpleNamespace):
    """What models read of a part of a module on another stage, whose placeholder is `placeholder`."""

    def __getattr__(self, name: str) -> NoReturn:
        placeholder = vars(self).get("placeholder")  # none while it is copied
        raise AttributeError(name) if placeholder is None else placeholder.absent(name)


class _AbsentWeight(Tensor):
    """A weight of another stage between two passes: its dtype and device can be read, and no value."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `function`, which asks for no value; raises AttributeError if it is another one, such as `sum`."""
        if function.__name__ not in ("__get__", "__set__", "size", "dim", "numel", "type", "is_floating_point", "to"):
            raise next(each.problem for each in args if isinstance(each, cls))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class StagePlaceholder(nn.Module):
    """Base class of the placeholders for modules of other stages.

    Attributes:
        place: path of the module in the model, and the stage that holds it, for messages.
    """

    place = ("", "another pipeline stage")

    def __init__(self) -> None:
        super().__init__()
        self.stage_input = StageInput()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise self.absent(name) from None

    def absent(self, name: str) -> AttributeError:
        """Return the error for a part of the module that is not here."""
        path, stage = self.place
        name = f"{path}.{name}".lstrip(".")
        return AttributeError(f"'{name}' is part of a module on {stage}; read it there, or before boost()")

    @property
    def weight(self) -> Tensor:
        """A dummy tensor, for models that read the dtype or device of a module on another stage."""
        dummy = self.stage_input.dummy()
        if self.stage_input.is_running:
            return dummy
        absent = dummy.as_subclass(_AbsentWeight)
        absent.problem = self.absent("weight")
        return absent

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden state."""
        return self.stage_input.dummy().dtype

    @property
    def device(self) -> torch.device:
        """The device of the hidden state."""
        return self.stage_input.dummy().device


class Received(StagePlaceholder):
    """Placeholder for an embedding on a later stage; returns a dummy shaped like the hidden state."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a dummy shaped like the hidden state."""
        return self.stage_input.dummy()


class ReceivedPatches(Received):
    """Placeholder for an image embedding; the model also reads the dtype of its projection to cast the pixels."""

    patch_embeddings = SimpleNamespace(projection=SimpleNamespace(weight=torch.empty(0)))


class ReceivedUnpadded(StagePlaceholder):
    """Placeholder for an embedding padded to blocks; the dummy takes its length from the token ids."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros [batch, seq, hidden] as long as `ids` [batch, seq]."""
        dummy = self.stage_input.dummy()
        return dummy if dummy.dim() == 0 else dummy.new_zeros(*ids.shape, dummy.shape[-1])


class ReceivedByTower(StagePlaceholder):
    """Placeholder for an embedding of a tower; if the tower has finished, it returns the tower's kept output."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the kept output of the tower, or a dummy shaped like the hidden state."""
        kept = next((value for value in self.stage_input.kept.values() if value is not None), None)
        return self.stage_input.dummy() if kept is None else kept.detach()


class ZeroEmbedding(StagePlaceholder):
    """Placeholder for an embedding that is added to another; the received hidden state already includes it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return zero (0-d), which adds nothing, on the device: models move it there, and the host would wait."""
        hidden = self.stage_input.hidden
        return torch.zeros(()) if hidden is None else hidden.new_zeros(())


class IdentityPlaceholder(StagePlaceholder):
    """Placeholder for a module that an earlier stage has already applied (an embedding's norm or dropout)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `x`."""
        return x


class LayerInputPlaceholder(StagePlaceholder):
    """Placeholder for the last part of the layer before a stage; returns a copy of the received hidden state."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return a copy of the received hidden state; `x` if none has been received."""
        return x if self.stage_input.hidden is None else self.stage_input.hidden.clone()


class CachedTower(StagePlaceholder):
    """Placeholder for a tower (an encoder) that earlier stages have run; returns the received tower outputs."""

    def __init__(self, path: str, fields: Sequence[str]) -> None:
        super().__init__()
        self.path, self.fields = path, tuple(fields)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received outputs of the tower, with dummies for fields that are not sent."""
        # Fields that no later layer reads are not sent; a dummy of the right shape is enough.
        kept = {field: self.stage_input.kept.get((self.path, field)) for field in ("last_hidden_state", *self.fields)}
        dummy = self.stage_input.dummy()
        return _tower_output()(**{field: dummy if value is None else value for field, value in kept.items()})


@cache
def _tower_output() -> type:
    """Return the class of a tower's output, where fields that are not sent (router scores, attentions) are None."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class TowerOutput(BaseModelOutputWithPooling):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return TowerOutput


class Skipped(StagePlaceholder):
    """Placeholder for a layer of an earlier stage; passes the hidden state through.

    The carried inputs follow the hidden state in the output, because models check whether they exist.

    Args:
        num_outputs: length of the tuple that the layer returns; 0 if it returns the bare hidden state.
        carried_inputs: names of the carried inputs that the layer returns.
    """

    def __init__(self, num_outputs: int, carried_inputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.num_outputs, self.carried_inputs = num_outputs, tuple(carried_inputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state in the form in which the layer returns it."""
        hidden_states = args[0] if args else next(iter(kwargs.values()))
        if not self.num_outputs:
            return hidden_states
        carried = [self.stage_input.carried.get(name) for name in self.carried_inputs]
        return (hidden_states, *carried, *[None] * (self.num_outputs - 1 - len(carried)))


class Boundary(StagePlaceholder):
    """Placeholder for the first layer of the next stage; ends the pass by raising `StageBoundary`."""

    def __init__(
        self,
        layer: nn.Module,
        carried_inputs: Sequence[str],
        keeps: Sequence[tuple[str, str]],
        shared_states: States,
    ) -> None:
        super().__init__()
        self.inputs, self.carried_inputs, self.keeps = LayerInputs(layer), tuple(carried_inputs), tuple(keeps)
        self.shared_states = shared_states

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `StageBoundary` with the hidden state, the carried inputs and the kept tower outputs."""
        hidden = self.inputs.get(self.inputs.names[0], args, kwargs)
        carried = [joined_blocks(self.inputs.get(name, args, kwargs), 1) for name in self.carried_inputs]
        states = {name: self.inputs.get(name, args, kwargs) for name in self.shared_states}
        self.stage_input.kept.update(written(self.shared_states, states))
        kept = [self.stage_input.kept.get(key) for key in self.keeps]
        while kept and kept[-1] is None:
            kept.pop()
        raise StageBoundary((hidden, *carried, *kept))


class UnreachablePlaceholder(StagePlaceholder):
    """Placeholder for a module of another stage that this stage's pass never reaches."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a RuntimeError: the pass should have ended before."""
        raise RuntimeError(
            f"the module '{self.path}' lives on another pipeline stage; the StageLayout of the family does not know "
            "that this configuration reads it here; use pp_size=1"
        )


def enter_at(
    layer: nn.Module,
    stage_input: StageInput,
    carried_inputs: Sequence[str],
    shared_states: States,
) -> None:
    """Replace the inputs of `layer`, the first layer of a stage, by the received hidden state and carried inputs.

    The received entries of shared dictionaries are added to the dictionaries, which all later layers read.

    This wraps the call instead of using a hook: hooks run inside activation checkpointing, where a recomputation would
    read the message of another micro-batch.
    """
    inputs = LayerInputs(layer)

    def read(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        values = {inputs.names[0]: stage_input.hidden, **{name: stage_input.carried[name] for name in carried_inputs}}
        for name, value in values.items():
            args, kwargs = inputs.put(name, value, args, kwargs)
        states = {name: inputs.get(name, args, kwargs) for name in shared_states}
        add_received(shared_states, states, stage_input.kept)
        return call(*args, **kwargs)

    call_through(layer, read)


def keep_output(module: nn.Module, path: str, fields: Sequence[str], stage_input: StageInput) -> None:
    """Register a hook that stores the output fields of `module` that later stages need."""

    def remember(_: nn.Module, __: tuple, output: Any) -> None:
        for field in fields:
            stage_input.kept[path, field] = output[field]

    module.register_forward_hook(remember)


def hook_captured_outputs(model: nn.Module) -> None:
    """Register the hooks that collect hidden states now: later, layers of other stages are placeholders.

    transformers registers them in the first pass that asks for hidden states, and those of a backbone when it is built:
    the hooks of a part of the model are removed first, because a second one would collect each hidden state twice.
    """
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if not isinstance(model, PreTrainedModel) or getattr(model, "_output_capturing_hooks_installed", False):
        return
    for module in model.modules():
        for key in [key for key, hook in module._forward_hooks.items() if _collects_outputs(hook)]:
            del module._forward_hooks[key]
    maybe_install_capturing_hooks(model)


def _collects_outputs(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def with_attributes(stand_in: StagePlaceholder, native: nn.Module) -> StagePlaceholder:
    """Copy to a placeholder what models read without a call, such as strides; hooks collect its output."""
    for key, hook in native._forward_hooks.items():
        if _collects_outputs(hook):
            stand_in._forward_hooks[key] = hook
    known = {name: value for cls in reversed(type(native).__mro__) for name, value in vars(cls).items()} | vars(native)
    known = {name: value for name, value in known.items() if not name.startswith("__") and not hasattr(nn.Module, name)}
    simple = {name: value for name, value in known.items() if isinstance(value, (int, float, str, tuple))}
    stand_in.__dict__ |= {name: value for name, value in simple.items() if name not in stand_in.__dict__}
    for name in native._non_persistent_buffers_set:  # such as position ids
        if not hasattr(stand_in, name):
            stand_in.register_buffer(name, native._buffers[name], persistent=False)
    tables = [path for path, part in native.named_modules() if path and isinstance(part, nn.ModuleDict)]
    for path, part in native.named_modules():
        is_read = path in tables or (isinstance(stand_in, Skipped) and path)
        if not is_read or any(path.startswith(f"{table}.") for table in tables):
            continue
        *owners, last = path.split(".")
        node = stand_in.__dict__
        for owner in owners:
            node = node.setdefault(owner, _PartOfPlaceholder(placeholder=stand_in)).__dict__
        # Models look up the number of a part, such as a language, and numbers of the parts of their first layer.
        numbers = _PartOfPlaceholder(placeholder=stand_in, **_numbers(part))
        node[last] = dict.fromkeys(part) if path in tables else numbers
    return stand_in


def _numbers(module: nn.Module) -> dict[str, int | float]:
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}
