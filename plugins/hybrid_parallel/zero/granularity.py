"""How many values an optimizer reads to update one value, found by trying the user's object.

The class says little: a subclass of AdamW may divide by the norm of a tensor, and a third-party optimizer may be as
elementwise as SGD. So a copy of the object, with small parameters instead of the model's, takes some steps on them
whole, split in two, and alone. If a split changes nothing, ranks may hold parts of parameters. If leaving out the other
parameters changes nothing, ranks may hold different parameters.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.zero.user_optimizer import step_in_parts
from shardformer.distributed.random import random_numbers_apart, seed_default_generators

# Optimizers of torch that are known to be elementwise.
_ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
)
# By number of dims. One matrix is large, because some optimizers treat smaller ones differently.
_SHAPES = {1: [(7,), (12,)], 2: [(130, 129), (4, 6)], 3: [(5, 3, 4), (2, 3, 2)], 4: [(3, 2, 2, 2), (2, 2, 3, 1)]}
_STEPS = 26  # some preconditioners start only after several steps
_STEPS_WITH_CLOSURE = 4
_SCALES = (1.0, 30.0, 0.03)  # of gradients, in turn: clipping only shows in large ones
_LR = 1e-2  # used if a schedule begins with 0
_CLOSE = {"rtol": 1e-5, "atol": 1e-13}


class Granularity(IntEnum):
    """The unit that must be whole on one rank."""

    ELEMENT = 0
    PARAMETER = 1
    MODEL = 2


def granularity_of(optim: torch.optim.Optimizer) -> Granularity:
    """Find what the update of one value depends on; an object that cannot be tried counts as PARAMETER."""
    step, cls = vars(optim).get("step"), type(optim)
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        return Granularity.PARAMETER  # an instance's own `step` is bound to this object, so a copy cannot use it
    if cls.__module__.startswith("torch.optim") and cls.__name__ in _ELEMENTWISE:
        return Granularity.ELEMENT
    with random_numbers_apart(), torch.no_grad():
        return _try_out(optim)


def steps_in_parts(optim: torch.optim.Optimizer) -> bool:
    """Try whether a step in parts has the very same numbers; an object that cannot be tried counts as one that does."""
    if "step" in vars(optim) and not getattr(optim.step, "_wrapped_by_lr_sched", False):
        return True

    def step_on_each(twin: torch.optim.Optimizer, *closure: Callable) -> None:
        parts = [[param] for group in twin.param_groups for param in group["params"]]
        step_in_parts(twin, parts, partial(type(twin).step, twin))

    with random_numbers_apart(), torch.no_grad():
        try:
            values = _values(optim)
            whole = _moves(optim, values, lambda tensor: [tensor], has_closure=False)
        except Exception:  # needs a closure, with which it steps on all parameters at once
            return True
        try:
            parts = _moves(optim, values, lambda tensor: [tensor], has_closure=False, step=step_on_each)
        except Exception:  # a user's step may raise anything
            return False
    return all(torch.equal(*pair) for each in zip(parts, whole, strict=True) for pair in zip(*each, strict=True))


def _try_out(optim: torch.optim.Optimizer) -> Granularity:
    """Try the optimizer without a closure and with one, as far as it takes steps without and with one."""
    found = []
    for has_closure in (False, True):
        try:
            found.append(_try_with(optim, has_closure))
        except Exception:  # a user's step may raise anything
            continue
    return max(found, default=Granularity.PARAMETER)


def _try_with(optim: torch.optim.Optimizer, has_closure: bool) -> Granularity:
    moves = partial(_moves, has_closure=has_closure)
    values = _values(optim)
    whole = moves(optim, values, lambda tensor: [tensor])
    if not any(move.any() for group in whole for move in group):
        return Granularity.PARAMETER
    first = next(index for index, group in enumerate(values) if group)
    alone = [group[: int(index == first)] for index, group in enumerate(values)]
    if not _same(moves(optim, alone, lambda tensor: [tensor])[first], whole[first][:1]):
        return Granularity.MODEL
    try:
        cut = moves(optim, values, _in_two)
    except Exception:  # the step accepts only matrices
        return Granularity.PARAMETER
    return Granularity.ELEMENT if all(map(_same, cut, whole)) else Granularity.PARAMETER


def _values(optim: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return small parameters, by group, with as many dims as the optimizer's."""
    return [
        [torch.randn(shape, dtype=torch.float64, generator=_generator(index)) for shape in _shapes(group["params"])]
        for index, group in enumerate(optim.param_groups)
    ]


def _moves(
    optim: torch.optim.Optimizer,
    values: Sequence[Sequence[Tensor]],
    pieces_of: Callable[[Tensor], list[Tensor]],
    has_closure: bool,
    step: Callable[..., Any] | None = None,
) -> list[list[Tensor]]:
    """Run the optimizer's copy on pieces of `values`; return changes, flat, by group; `step`: of the copy."""
    seed_default_generators(0)
    parameters = [[[nn.Parameter(part.clone()) for part in pieces_of(each)] for each in group] for group in values]
    twin = _twin(optim, [[part for parts in group for part in parts] for group in parameters])
    if callable(getattr(twin, "train", None)):  # a schedule-free optimizer steps only in training mode
        twin.train()

    def noise(step: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for number, (group, tensors) in enumerate(zip(parameters, values, strict=True)):
            for index, (parts, tensor) in enumerate(zip(group, tensors, strict=True)):
                generator = _generator(step, number, index)
                gradient = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
                yield from zip(parts, pieces_of(gradient * _SCALES[step % len(_SCALES)]), strict=True)

    def closure(step: int) -> Tensor:
        """Of each element p with noise n the loss n p + sin p: its gradient depends on p, and on no other element.

        Most elements have no minimum, where two optimizers that go different ways would meet.
        """
        loss = torch.zeros((), dtype=torch.float64)
        for part, its in noise(step):
            part.grad = its + part.detach().cos()
            loss += (its * part.detach() + part.detach().sin()).sum()
        return loss

    step = step or type(twin).step
    for number in range(_STEPS_WITH_CLOSURE if has_closure else _STEPS):
        for part, its in noise(number):
            part.grad = its.clone()
        with torch.enable_grad():
            step(twin, *([partial(closure, number)] if has_closure else []))
    return [
        [
            torch.cat([part.detach().flatten() for part in parts]) - tensor.flatten()
            for parts, tensor in zip(group, tensors, strict=True)
        ]
        for group, tensors in zip(parameters, values, strict=True)
    ]


def _twin(optim: torch.optim.Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """Copy the optimizer, without its state, onto other parameters; the user's parameters are not touched."""
    groups: list[dict[str, Any]] = [{"params": list(group)} for group in parameters]
    state: dict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {id(optim.param_groups): groups, id(optim.state): state}
    for theirs, ours in zip(optim.param_groups, groups, strict=True):
        memo[id(theirs["params"])] = ours["params"]  # an optimizer may keep the list (LBFGS)
        memo |= {id(param): (ours["params"] or [nn.Parameter(torch.zeros(1))])[0] for param in theirs["params"]}
        ours |= {key: copy.deepcopy(value, memo) for key, value in theirs.items() if key != "params"}
        if "lr" in ours and ours["lr"] is not None and float(ours["lr"]) == 0.0:
            ours["lr"] = _LR
    twin = object.__new__(type(optim))
    memo[id(optim)] = twin
    twin.state, twin.param_groups = state, groups
    for name, value in vars(optim).items():
        if name.startswith("_optimizer_"):  # the user's hooks
            setattr(twin, name, OrderedDict())
        elif name not in ("state", "param_groups", "step"):
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin


def _shapes(params: Sequence[nn.Parameter]) -> list[tuple[int, ...]]:
    return [shape for dim in sorted({param.dim() for param in params}) for shape in _SHAPES.get(dim, ())]


def _in_two(tensor: Tensor) -> list[Tensor]:
    flat = tensor.flatten()
    return list(flat.split([flat.numel() // 3, flat.numel() - flat.numel() // 3]))


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.allclose(each, other, **_CLOSE) for each, other in zip(found, expected, strict=True))


def _generator(*numbers: int) -> torch.Generator:
    seed = 17
    for number in numbers:
        seed = seed * 1009 + number
    return torch.Generator().manual_seed(seed)
