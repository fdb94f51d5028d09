"""The user's optimizer over this rank's pieces of parameters: its steps, its states and its groups.

It steps on all parameters, or on those of one bucket after the other. An optimizer counts what it does: hooks run, and
options of its groups change (the `k` and the `weight_sum` of schedule-free optimizers). That must happen once a step,
whatever the number of parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon
from torch.optim import optimizer as torch_optimizer

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice, StateMemory
from plugins.hybrid_parallel.zero.whole_parameters import OwnedParameter, WholeParameters
from shardformer.shard_spec import spec_of
from shardformer.utils.freed_memory import return_freed_memory

_COUNTERS = int | float | bool | None


def step_in_parts(
    optim: torch.optim.Optimizer,
    parts: Sequence[Sequence[nn.Parameter]],
    step: Callable[..., Any],
    after: Callable[[int], None] = lambda index: None,
) -> Any:
    """Step on one part after the other.

    Args:
        parts: parameters of its groups, each in one part.
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
    """Run hooks of a step before and after this context, not those inside; yields the arguments they leave."""
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


_MOST_IN_A_BATCH = 2**26  # elements of matrices of Muon: from there on a product by itself fills a GPU


def batched_muon(
    params: Sequence[Tensor], grads: Sequence[Tensor], sums: Sequence[Tensor], *, lr: float, **given: Any
) -> None:
    """Do what torch's `muon` does, with its arguments and one batch of products for the matrices of one shape."""
    if not params:
        return
    lr, momentum, (a, b, c) = float(lr), given["momentum"], given["ns_coefficients"]
    torch._foreach_lerp_(sums, grads, 1 - momentum)
    updates = torch._foreach_lerp(grads, sums, momentum) if given["nesterov"] else sums
    torch._foreach_mul_(params, 1 - lr * given["weight_decay"])
    by_shape: dict[torch.Size, list[int]] = {}
    for index, param in enumerate(params):
        by_shape.setdefault(param.shape, []).append(index)
    for shape, indices in by_shape.items():
        rate, is_tall = torch_muon._adjust_lr(lr, given["adjust_lr_fn"], shape), shape[0] > shape[1]
        count = max(1, _MOST_IN_A_BATCH // max(1, shape.numel()))
        for members in (indices[first : first + count] for first in range(0, len(indices), count)):
            x = torch.stack([updates[index].bfloat16() for index in members])  # [count, rows, columns]
            x = x.mT if is_tall else x
            x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=given["eps"])
            for _ in range(given["ns_steps"]):
                gram = x @ x.mT
                x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            for index, move in zip(members, (x.mT if is_tall else x).unbind(), strict=True):
                params[index].add_(move, alpha=-rate)


# Bytes of the smallest state of another shape than its parameter that is moved, such as a preconditioner.
_LEAST = 2**16
_AHEAD = 2  # buckets whose states are read before their step


def move_overrides(optim: torch.optim.Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let options that bitsandbytes' `GlobalOptimManager` has for single parameters hold for what stands for them.

    The manager knows parameters by identity, and by their places in the groups, which hold others here. Trainer asks
    it for states of embeddings in 32 bit.

    Args:
        pairs: (parameter, tensor that the optimizer holds for it).
    """
    manager = getattr(optim, "mng", None)
    if manager is None:
        return
    of_modules = manager.module_weight_config_triple
    known = {id(getattr(module, name, None)): options for module, name, options in of_modules} | manager.pid2config
    manager.pid2config |= {id(new): known[id(old)] for old, new in pairs if id(old) in known}
    manager.index2config.clear()


class Stepper:
    """Runs the steps of the user's optimizer, and keeps its states where they belong.

    States that are offloaded are made by its first step in plain memory, which must never have all of them: it then
    steps on one bucket after the other, whose states move after it. A step with a closure evaluates the whole model in
    its middle, so it runs on all parameters at once.
    """

    def __init__(self, optim: torch.optim.Optimizer, memory: StateMemory) -> None:
        self._optim, self._memory = optim, memory
        self._parts: list[_Part] = []

    def step(self, updated: Sequence[Bucket | OwnedParameter], closure: Callable[[], Any] | None) -> Any:
        """Run a step on what the optimizer updates, and return what it returns."""
        if hasattr(self._optim, "mng"):
            move_overrides(self._optim, (pair for each in updated for pair in _pairs(each)))
        if closure is not None or not self._memory.is_offloaded:
            # On CPUs a batch gains nothing, and rounds otherwise.
            is_batched = type(self._optim) is torch.optim.Muon and any(each.params[0].is_cuda for each in updated[:1])
            with mock.patch.object(torch_muon, "muon", batched_muon) if is_batched else nullcontext():
                result = self._optim.step() if closure is None else self._optim.step(closure)
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
        """Move states that are not where they belong: new ones, loaded ones, those of an optimizer that has stepped."""
        for part in self._present_parts(updated) if self._memory.is_offloaded else ():
            part.take_states(self._optim)
            part.page_out()

    def empty_state(self, parameter: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a state that is going to be loaded."""
        for part in self._parts:
            if parameter in part.places:
                return part.empty(part.places[parameter], key, shape, dtype)
        return torch.empty(shape, dtype=dtype, device=parameter.device)

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


def _pairs(holder: Bucket | OwnedParameter) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield the parameters of the model, each with what the optimizer updates for it."""
    if isinstance(holder, OwnedParameter):
        yield holder.local, holder.params[0]
    else:
        yield from ((holder.params[piece.index], piece.parameter) for piece in holder.pieces)


class _Part:
    """The parameters of one bucket that the user's optimizer holds, or one whole parameter, with their states.

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
            self.holder.page_out()

    def _all(self) -> list[Tensor]:
        found = [*self._flat.values(), *self._other.values()]
        if isinstance(self.holder, Bucket):
            found += [self.holder.shard.values]
            found += [] if self.holder.shard_grads is None else [self.holder.shard_grads]
        return found


def take_states(
    optim: torch.optim.Optimizer, old: Mapping[nn.Parameter, nn.Parameter]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Remove the states from an optimizer that has stepped, or starts with some (Adagrad), and return them.

    Args:
        old: local parameter -> the parameter that the optimizer was created with.

    Returns:
        The states by local parameter.
    """
    states = {local: state for local, param in old.items() if (state := optim.state.get(param))}
    optim.state.clear()
    return states


def place_states(
    optim: torch.optim.Optimizer, states: dict[nn.Parameter, dict[str, Any]], buckets: Sequence[Bucket | OwnedParameter]
) -> None:
    """Give pieces their parameter's state; `states`: whole, by local parameter, popped; `buckets`: of the pieces."""
    for bucket in buckets:
        group = optim.param_groups[bucket.group_index]
        for piece in bucket.pieces:
            state, spec = states.get(bucket.params[piece.index]), spec_of(bucket.params[piece.index])
            if not state:
                continue

            def cut(key: str, value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value
                if tuple(value.shape) != spec.full_shape:  # noqa: B023
                    return on_state_device(key, value, group, piece.parameter)  # noqa: B023
                local = spec.shard(value).reshape(-1)[piece.start : piece.stop]  # noqa: B023
                return local.to(piece.parameter.device).view_as(piece.parameter)  # noqa: B023

            optim.state[piece.parameter] = {key: cut(key, value) for key, value in state.items()}
        for param in bucket.params:
            states.pop(param, None)


def on_state_device(key: str, value: Tensor, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Return a state on the device where the optimizer expects it, by the rule of `Optimizer.load_state_dict`.

    States are on the parameter's device, except the number of steps: the kernels of fused and capturable optimizers
    read it on the device, all others read it on the host.
    """
    if key != "step":
        return value.to(parameter.device)
    if group.get("fused") or group.get("capturable"):
        return value.to(parameter.device, torch.float32)
    return value


_PIECES = "pieces"  # marks a state dict of pieces, and describes them


def state_dict_of_pieces(optim: torch.optim.Optimizer, buckets: Sequence[Bucket | OwnedParameter]) -> dict[str, Any]:
    """Return the state dict of an optimizer over pieces, with a description of the pieces."""
    return {**optim.state_dict(), _PIECES: _describe(buckets)}


def load_state_dict(
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    buckets: Sequence[Bucket | OwnedParameter],
    order: Sequence[Sequence[nn.Parameter | None]],
    wholes: WholeParameters,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Load a state dict of the same pieces, or of the optimizer before `boost`.

    Args:
        order: the local parameters as the optimizer held them before, by group; None for parameters of other stages.

    Returns:
        The states of parameters that have no bucket.

    Raises:
        ConfigurationError: if the state dict is for another rank's pieces or for other groups.
    """
    if _PIECES in state_dict:
        if state_dict[_PIECES] != _describe(buckets):
            raise ConfigurationError(
                "optimizer.load_state_dict() got the state of another rank or layout; save and load by "
                "booster.save_optimizer(optimizer, directory) and booster.load_optimizer"
            )
        optim.load_state_dict({key: value for key, value in state_dict.items() if key != _PIECES})
        return {}
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group) for group in order]:
        raise ConfigurationError(
            f"optimizer.load_state_dict() got groups of {[len(group['params']) for group in saved]} parameters, the "
            f"optimizer has {[len(group) for group in order]}; make it with the same groups"
        )
    states = {
        param: dict(state_dict["state"][index])
        for group, params in zip(saved, order, strict=True)
        for index, param in zip(group["params"], params, strict=True)
        if param is not None and index in state_dict["state"]
    }
    for group, theirs in zip(optim.param_groups, saved, strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    optim.state.clear()
    wholes.take_states(states)
    place_states(optim, states, buckets)
    return states


def _describe(buckets: Sequence[Bucket | OwnedParameter]) -> list[list[int]]:
    return [
        [bucket.group_index, piece.index, piece.start, piece.stop, *bucket.params[piece.index].shape]
        for bucket in buckets
        for piece in bucket.pieces
    ]


class UserGroups:
    """Re-points parameter groups, emptied in place, at pieces of parameters and at whole ones that this rank owns.

    Args:
        order: the local parameters as the groups held them before; None for parameters of other stages.
        wholes: the parameters whose pieces are not for the optimizer.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        order: Sequence[Sequence[nn.Parameter | None]],
        wholes: WholeParameters,
    ) -> None:
        self._groups, self._wholes = groups, wholes
        self._places = {param: place for group in order for place, param in enumerate(group) if param is not None}
        self._held: dict[int, int] = {}  # id of a parameter in the groups -> place
        for group in groups:
            group["params"].clear()  # in place: an optimizer may keep the list (LBFGS)

    def add(self, buckets: Iterable[Bucket | OwnedParameter], owned: Iterable[OwnedParameter]) -> None:
        """Add what this rank updates, in the order of the user's parameters."""
        for each in owned:
            self._add(each.group_index, {each.params[0]: self._places[each.local]})
        for bucket in buckets:
            pieces = {piece: self._places[param] for param, piece in _pairs(bucket) if param not in self._wholes}
            self._add(bucket.group_index, pieces)
        for group in self._groups:
            group["params"].sort(key=lambda param: self._held[id(param)])

    def _add(self, index: int, places: dict[nn.Parameter, int]) -> None:
        self._held |= {id(param): place for param, place in places.items()}
        self._groups[index]["params"] += places

    def has_strangers(self) -> bool:
        """Return whether a group holds parameters that were added after `boost`, which have no gradients here."""
        return not all(self._held.keys() >= set(map(id, group["params"])) for group in self._groups)
