"""Materialization: gives values to a model that was built, and sharded, on the meta device; empty copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.layers.parallel_module import sum_partial_gradients
from shardformer.lazy.init_log import RecordedValues
from shardformer.shard_spec import ShardSpec, annotate, grad_group_of, parameter_like, spec_of
from shardformer.utils.freed_memory import FreedMemory

# (parameter name, spec of the piece on this rank) -> the values of that piece.
WeightReader = Callable[[str, ShardSpec], Tensor]


def set_weight_reader(model: nn.Module, reader: WeightReader) -> None:
    """Set the source of the values of a model on the meta device, for use after sharding."""
    model.weight_reader = reader


def weight_reader_of(model: nn.Module) -> WeightReader | None:
    """Return the reader that `set_weight_reader` set; None if there is none."""
    return getattr(model, "weight_reader", None)


def waits_for_values(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers on the meta device."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


def materialize(model: nn.Module, reader: WeightReader | None = None, seed: int | None = None) -> None:
    """Give values to every parameter on the meta device; the reader sees each once, under its first name.

    Args:
        model: as built in `record_module_init`, for a whole model in plain torch; or, with a reader, after
            `ShardFormer.optimize`, when each parameter has the shape of this rank's piece.
        reader: asked for one piece at a time, so that at most one whole tensor is in memory in addition to the
            pieces. None for the values that the model was recorded with.
        seed: seed of the random numbers of a recorded model; None for torch's current seed.

    Raises:
        ValueError: the reader returned a piece of another shape, the values of a parameter are unknown, or a buffer is
            on the meta device.
    """
    if reader is None:
        reader = RecordedValues(model, torch.initial_seed() % 2**31 if seed is None else seed)
        reader.fill_buffers(model)
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if buffers:
        raise ValueError(
            f"buffer {buffers[0]} is on the meta device, where it lost its values; build the model in "
            "record_module_init()"
        )
    waiting = [(name, parameter) for name, parameter in model.named_parameters() if parameter.is_meta]
    freed = FreedMemory(sum(parameter.nbytes for _, parameter in waiting))
    # Largest first: a large whole tensor then coexists with few pieces.
    for name, parameter in sorted(waiting, key=lambda each: -math.prod(spec_of(each[1]).full_shape)):
        # In place: other objects (tied names, the pipeline's list of shared parameters) refer to the same parameter.
        values, grad_group = read_values(reader, name, parameter), grad_group_of(parameter)
        made = annotate(parameter_like(parameter, values.to(parameter.dtype)), spec_of(parameter), grad_group)
        torch.utils.swap_tensors(parameter, made)
        del values, made
        freed.add(math.prod(spec_of(parameter).full_shape) * parameter.element_size())
    sum_partial_gradients(model)


def read_values(reader: WeightReader, name: str, parameter: nn.Parameter) -> Tensor:
    """Return the values of a parameter from a reader.

    Raises:
        ValueError: the reader returned a piece of another shape, or does not know the parameter.
    """
    spec = spec_of(parameter)
    with torch.no_grad():
        values = reader(name, spec)
    if values.shape != parameter.shape:
        raise ValueError(
            f"the piece of {name} that was read has shape {tuple(values.shape)}; this rank holds "
            f"{tuple(parameter.shape)} of {spec.full_shape}"
        )
    return values


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def empty_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a model; parameters are on the meta device, buffers and hooks are those of the original.

    The copy does not know where the model reads its values. Buffers of the model have values already.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _empty(parameter)
        hooks = [held for name in _HOOKS if (held := vars(module).get(name)) is not None]
        # Hooks may be methods of any object, which a deep copy would include.
        kept = chain(module._buffers.values(), *(held.values() for held in hooks))
        memo |= {id(each): each for each in kept if each is not None}
        # A deep copy of an ordered dictionary, even of an empty one, takes longer than all the rest of a module.
        memo |= {id(held): held.copy() for held in hooks}
    reader = vars(model).get("weight_reader")
    if reader is not None:
        memo[id(reader)] = None
    found = copy.deepcopy(model, memo)
    found.__dict__.pop("weight_reader", None)
    return found


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    found.__dict__.update(parameter.__dict__)
    return found
