"""A step of the user's optimizer in parts: on some of its parameters after the other, with the numbers of one step.

An optimizer counts what it does: hooks run, and options of its groups change (the `k` and the `weight_sum` of
schedule-free optimizers). That must happen once a step, whatever the number of parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

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
