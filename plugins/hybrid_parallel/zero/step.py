"""A step of the user's optimizer: its inputs, its parameters, and the runs over buckets or over parts.

Stepper: runs the step of the user's optimizer, and keeps its states where they belong.

The states of an optimizer are made by its first step, in plain memory. If they are offloaded, it must never have all of
them there: it steps one bucket at a time, whose states then move.

A step of the user's optimizer in parts: on some of its parameters after the other, with the numbers of one step.

An optimizer counts what it does: hooks run, and options of its groups change (the `k` and the `weight_sum` of
schedule-free optimizers). That must happen once a step, whatever the number of parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice, StateMemory
from plugins.hybrid_parallel.zero.gathers import ParameterGathers
from plugins.hybrid_parallel.zero.grouping import TiedParameter
from plugins.hybrid_parallel.zero.whole_parameters import OwnedParameter, WholeParameters
from shardformer.utils.freed_memory import return_freed_memory


class FrozenParameters:
    """Parameters of an optimizer that required no gradients when the model was boosted.

    Args:
        groups: the frozen parameters of each parameter group.
        build_buckets: builds buckets from parameters by group.
        states: existing optimizer states of some of the parameters; removed from here when they are placed.
        gathers: what has sharded the parameters (ZeRO stage 3); None if they are whole.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        build_buckets: Callable[[Sequence[Sequence[nn.Parameter]]], list[Bucket]],
        states: dict[nn.Parameter, dict[str, Any]],
        gathers: ParameterGathers | None = None,
    ) -> None:
        self.groups, self.states = [list(group) for group in groups], states
        self._build_buckets, self._gathers = build_buckets, gathers

    def unfreeze(self, also: Collection[nn.Parameter] = ()) -> list[Bucket]:
        """Build buckets for the parameters that require gradients by now, and for those in `also`."""
        chosen = [[param for param in group if param.requires_grad or param in also] for group in self.groups]
        if not any(chosen):
            return []
        thawed = {param for group in chosen for param in group}
        if self._gathers is not None:
            self._gathers.dissolve(thawed)
        self.groups = [[param for param in group if param not in thawed] for group in self.groups]
        return self._build_buckets(chosen)


def check_tied(tied: Mapping[nn.Parameter, TiedParameter], model: nn.Module) -> None:
    """Check that all stages agree on whether a tied parameter is frozen: its name differs from stage to stage.

    Raises:
        ConfigurationError: if a parameter is frozen on only some of its stages; raised on all of them.
    """
    for param, tie in sorted(tied.items(), key=lambda item: item[1].order):
        flags = torch.tensor([int(param.requires_grad), int(not param.requires_grad)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=tie.group)
        if flags.tolist() == [1, 1]:
            name = next(name for name, other in model.named_parameters() if other is param)
            raise ConfigurationError(
                f"{name} is one weight on several pipeline stages, and only some of them have frozen it; set "
                "requires_grad by every name that the tied weight has"
            )


_COUNTERS = int | float | bool | None


def step_in_parts(
    optim: torch.optim.Optimizer,
    parts: Sequence[Sequence[nn.Parameter]],
    step: Callable[..., Any],
    after: Callable[[int], None] = lambda index: None,
) -> Any:
    """Step on one part after the other.

    Args:
        optim: the user's optimizer.
        parts: parameters of its groups, each in one part.
        step: its step.
        after: called with the index of each part whose step is done.

    Returns:
        What the last step returned.
    """
    held, result = [list(group["params"]) for group in optim.param_groups], None
    before = _Counters(optim)
    with _hooks_once(optim) as (args, kwargs):
        try:
            for index, part in enumerate(parts):
                members = set(part)
                for group, params in zip(optim.param_groups, held, strict=True):
                    # In place: an optimizer may keep the list.
                    group["params"][:] = [param for param in params if param in members]
                if index:
                    before.restore()
                result = step(*args, **kwargs)
                after(index)
        finally:
            for group, params in zip(optim.param_groups, held, strict=True):
                group["params"][:] = params
    return result


class _Counters:
    """What a step may change in an optimizer outside of the states of parameters: options of groups, and numbers."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim
        self._groups = [
            {key: (value, _copy_of(value)) for key, value in group.items() if key != "params"}
            for group in optim.param_groups
        ]
        self._numbers = {name: value for name, value in vars(optim).items() if isinstance(value, _COUNTERS)}

    def restore(self) -> None:
        """Set them to what they were."""
        for group, options in zip(self._optim.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in options]:
                del group[key]
            for key, (value, copy) in options.items():
                group[key] = value.copy_(copy) if isinstance(value, Tensor) else value
        vars(self._optim).update(self._numbers)


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _hooks_once(optim: torch.optim.Optimizer) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """Run the hooks of a step before and after this context, and none of the steps in it.

    Yields the arguments that the hooks have left for the step.
    """
    stores = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    own = (optim._optimizer_step_pre_hooks, optim._optimizer_step_post_hooks)
    before, after = ([*chain(shared.values(), theirs.values())] for shared, theirs in zip(stores, own, strict=True))
    args, kwargs = (optim,), {}
    for hook in before:
        given = hook(optim, args, kwargs)
        if given is not None:
            args, kwargs = given
    shared = [OrderedDict(store) for store in stores]
    for store in stores:
        store.clear()
    optim._optimizer_step_pre_hooks, optim._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield args[1:], kwargs
    finally:
        for store, hooks in zip(stores, shared, strict=True):
            store.update(hooks)
        optim._optimizer_step_pre_hooks, optim._optimizer_step_post_hooks = own
    for hook in after:
        hook(optim, args, kwargs)


# Bytes of the smallest state of another shape than its parameter that is moved, such as a preconditioner.
_LEAST = 2**16
_AHEAD = 2  # buckets whose states are read before their step


class Stepper(Protocol):
    """Runs steps of the user's optimizer."""

    def step(self, updated: Sequence[Bucket | OwnedParameter], closure: Callable[[], Any] | None) -> Any:
        """Run a step on what the optimizer updates, and return what it returns."""

    def take_states(self, updated: Sequence[Bucket | OwnedParameter]) -> None:
        """Take over states that were made outside of a step: loaded, or of an optimizer that has stepped before."""

    def empty_state(self, parameter: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a state that is going to be loaded."""


class StepAtOnce:
    """Runs steps on all parameters, whose states stay where the optimizer has made them.

    Args:
        optim: the user's optimizer.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim

    def step(self, updated: Sequence[Bucket | OwnedParameter], closure: Callable[[], Any] | None) -> Any:
        """Run a step and return what it returns."""
        return self._optim.step() if closure is None else self._optim.step(closure)

    def take_states(self, updated: Sequence[Bucket | OwnedParameter]) -> None:
        """Leave states where they are."""

    def empty_state(self, parameter: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory on the parameter's device."""
        return torch.empty(shape, dtype=dtype, device=parameter.device)


class StepByBucket:
    """Runs steps on one bucket after the other, whose states are offloaded in between.

    A step with a closure evaluates the whole model in its middle, so it runs on all parameters at once.

    Args:
        optim: the user's optimizer.
        memory: where its states are.
    """

    def __init__(self, optim: torch.optim.Optimizer, memory: StateMemory) -> None:
        self._optim, self._memory = optim, memory
        self._parts: list[_Part] = []

    def step(self, updated: Sequence[Bucket | OwnedParameter], closure: Callable[[], Any] | None) -> Any:
        """Run a step and return what it returns."""
        if closure is not None:
            result = self._optim.step(closure)
            self.take_states(updated)
            return result
        parts = self._present_parts(updated)
        for part in parts[:_AHEAD]:
            part.read_ahead()

        def after(index: int) -> None:
            parts[index].take_states(self._optim)
            parts[index].page_out()
            for part in parts[index + _AHEAD : index + _AHEAD + 1]:
                part.read_ahead()

        # A rank without parameters still steps: hooks run, and options of groups change.
        return step_in_parts(self._optim, [part.parameters for part in parts] or [()], self._optim.step, after)

    def take_states(self, updated: Sequence[Bucket | OwnedParameter]) -> None:
        """Move states that are not where they belong."""
        for part in self._present_parts(updated):
            part.take_states(self._optim)
            part.page_out()

    def empty_state(self, parameter: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return offloaded memory for a state."""
        for part in self._parts:
            if parameter in part.places:
                return part.empty(part.places[parameter], key, shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def _present_parts(self, updated: Sequence[Bucket | OwnedParameter]) -> list[_Part]:
        """Return the parts in the order of the user's parameters, as far as buckets keep it."""
        known = {part.holder: part for part in self._parts}
        places = {param: place for group in self._optim.param_groups for place, param in enumerate(group["params"])}
        parts = [known.get(holder) or _Part(holder, self._memory) for holder in updated]
        for part in parts:
            part.places = {piece.parameter: piece for piece in part.holder.pieces if piece.parameter in places}
        self._parts = [part for part in parts if part.places]
        self._parts.sort(key=lambda part: (part.holder.group_index, min(places[each] for each in part.places)))
        return self._parts


def stepper_of(optim: torch.optim.Optimizer, memory: StateMemory) -> Stepper:
    """Return what runs the steps of an optimizer whose states are in `memory`."""
    return StepByBucket(optim, memory) if memory.is_offloaded else StepAtOnce(optim)


class _Part:
    """The parameters of one bucket that the user's optimizer holds, or one whole parameter, with their states.

    Args:
        holder: the bucket or the parameter.
        memory: where states are.

    Attributes:
        places: parameter of the optimizer -> its place in the bucket.
    """

    def __init__(self, holder: Bucket | OwnedParameter, memory: StateMemory) -> None:
        self.holder, self.places = holder, dict[nn.Parameter, BucketSlice]()
        self._memory = memory
        self._size = max((piece.offset + piece.stop - piece.start for piece in holder.pieces), default=0)
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}  # state of all pieces, [shard]
        self._other: dict[tuple[nn.Parameter, str], Tensor] = {}  # states of other shapes, flat

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the user's optimizer updates."""
        return list(self.places)

    def take_states(self, optim: torch.optim.Optimizer) -> None:
        """Move states that are not in the memory yet; numbers and packed tensors stay."""
        moved = False
        for parameter, piece in self.places.items():
            state = optim.state.get(parameter)
            for key, value in state.items() if isinstance(state, dict) else ():
                is_like = isinstance(value, Tensor) and value.shape == parameter.shape
                if type(value) is Tensor and (is_like or value.nbytes >= _LEAST):
                    place = self.empty(piece, key, value.shape, value.dtype)
                    if place.data_ptr() != value.data_ptr():
                        state[key], moved = place.copy_(value), True
        if moved:
            return_freed_memory()

    def empty(self, piece: BucketSlice, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the memory of a state."""
        if shape == piece.parameter.shape:
            if (key, dtype) not in self._flat:
                self._flat[key, dtype] = self._memory.empty(self._size, dtype, piece.parameter.device)
            return piece.view(self._flat[key, dtype]).view(shape)
        whole = self._other.get((piece.parameter, key))
        if whole is None or (whole.numel(), whole.dtype) != (shape.numel(), dtype):
            whole = self._memory.empty(shape.numel(), dtype, piece.parameter.device)
            self._other[piece.parameter, key] = whole
        return whole.view(shape)

    def read_ahead(self) -> None:
        """Start to bring what the step reads near."""
        for tensor in self._all():
            self._memory.read_ahead(tensor)

    def page_out(self) -> None:
        """Let what the step has read and written go."""
        for tensor in self._all():
            self._memory.page_out(tensor)
        if isinstance(self.holder, Bucket):
            self.holder.page_out_values()

    def _all(self) -> list[Tensor]:
        found = [*self._flat.values(), *self._other.values()]
        if isinstance(self.holder, Bucket):
            found += [self.holder.shard.values]
            found += [] if self.holder.shard_grads is None else [self.holder.shard_grads]
        return found


class StepRecord(Protocol):
    """Record of the passes since the last step."""

    microbatches: Sequence[Mapping[str, Any]]

    def add_loss(self, loss: Tensor) -> None:
        """Record the loss of a pass in an ordinary training loop."""

    def end_step(self) -> None:
        """Record that the optimizer takes its step."""

    def accept(self) -> None:
        """Record that the gradients of the step are finite."""


class Average(Protocol):
    """An average of the parameters of an optimizer."""

    num_updates: int

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Average the weights of further buckets."""

    def piece_of(self, bucket: Bucket, piece: BucketSlice) -> Tensor:
        """Return the average of a piece of a parameter, as a view that may be written."""

    def restart(self) -> None:
        """Forget the average: the next update copies the weights."""


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        max_norm: upper limit for the global gradient norm; None for no clipping.
        nonfinite: "raise", "skip" or "ignore" steps whose gradients are nan or inf on any rank.
        overlap_allgather: whether the all-gather of parameters may run until the next forward pass.
        stepper: runs the step of the user's optimizer.
    """

    max_norm: float | None
    nonfinite: str
    overlap_allgather: bool
    stepper: Stepper


@dataclass(frozen=True)
class LocalParameters:
    """The parameters of an optimizer on this rank.

    Attributes:
        names: local parameter -> its Hugging Face name.
        aliases: name -> the other names of the same (tied) parameter.
        order: the local parameters as the optimizer held them before, by group; None for those on other stages.
        frozen: the parameters that have no bucket yet.
        wholes: the parameters that the optimizer reads whole, although ranks hold parts of them.
        group_names: names of the parameters of the whole model, by group.
    """

    names: Mapping[nn.Parameter, str]
    aliases: Mapping[str, tuple[str, ...]]
    order: Sequence[Sequence[nn.Parameter | None]]
    frozen: FrozenParameters
    wholes: WholeParameters
    group_names: Sequence[Sequence[str]] = ()
