"""Values for the parameters of a model that was built, and sharded, on the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardformer.layers.partial_gradients import sum_in_backward
from shardformer.lazy.replay import RecordedValues
from shardformer.shard_spec import ShardSpec, annotate, grad_group_of, parameter_like, spec_of

# (name of the parameter, which piece of it is here) -> the values of that piece.
WeightReader = Callable[[str, ShardSpec], Tensor]


def set_weight_reader(model: nn.Module, reader: WeightReader) -> None:
    """Say where the values of a model on the meta device are to come from once it is sharded."""
    model.weight_reader = reader


def weight_reader_of(model: nn.Module) -> WeightReader | None:
    """What `set_weight_reader` said of the model."""
    return getattr(model, "weight_reader", None)


def waits_for_values(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers on the meta device."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


def materialize(model: nn.Module, reader: WeightReader | None = None, seed: int | None = None) -> None:
    """Give values to every parameter on the meta device; the reader sees each once, under its first name.

    Args:
        model: as it was built in `record_module_init`, for a whole model in plain torch; or, with a reader, after
            `ShardFormer.optimize`, when each parameter has the shape of this rank's piece.
        reader: asked for one piece at a time, so that no more than one tensor is in memory beside the pieces. None
            for the values that the model was recorded with.
        seed: of the random numbers of a recorded model; None for what torch was seeded with.

    Raises:
        ValueError: a piece of another shape was read, nothing is known of a parameter, or a buffer is on the meta
            device.
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
    # Largest first: the whole of a large tensor is beside few pieces then, and what it leaves fits all that follow.
    for name, parameter in sorted(waiting, key=lambda each: -math.prod(spec_of(each[1]).full_shape)):
        # In place: others (tied names, the pipeline's list of shared parameters) hold the parameter itself.
        torch.utils.swap_tensors(parameter, _with_values(name, parameter, reader))
    sum_in_backward(model)


def _with_values(name: str, parameter: nn.Parameter, reader: WeightReader) -> nn.Parameter:
    spec = spec_of(parameter)
    with torch.no_grad():
        values = reader(name, spec)
    if values.shape != parameter.shape:
        raise ValueError(
            f"the piece of {name} that was read has shape {tuple(values.shape)}; this rank holds "
            f"{tuple(parameter.shape)} of {spec.full_shape}"
        )
    return annotate(parameter_like(parameter, values.to(parameter.dtype)), spec, grad_group_of(parameter))
