"""Outputs of micro-batches: merging, and broadcast from the last stage to all stages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.agreement import broadcast_json
from plugins.hybrid_parallel.distributed.mesh import HybridMesh


def detached(outputs: Any) -> Any:
    """Detach the tensors of `outputs`, which may be nested in mappings and tuples; other values become None."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, Mapping):
        return type(outputs)(**{key: detached(value) for key, value in outputs.items()})
    return tuple(map(detached, outputs)) if isinstance(outputs, tuple | list) else None


def merge_outputs(outputs: Sequence[Any], lengths: Sequence[int] | None = None) -> Any:
    """Concatenate the outputs of micro-batches along the samples; scalars and caches in them are left out.

    Args:
        lengths: tokens of each micro-batch if they are parts of one row, whose outputs [1, part, ...] are concatenated
            along the tokens.

    Raises:
        ConfigurationError: if values of micro-batches differ in more than the number of samples, or of tokens.
    """
    if isinstance(outputs[0], Tensor) and not outputs[0].dim():
        return torch.stack(list(outputs))
    return _merge(outputs, "outputs", lengths)


def _merge(values: Sequence[Any], name: str, lengths: Sequence[int] | None) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        shapes = [tuple(value.shape) for value in values]
        if lengths is not None and "attention" not in name and are_parts_of_row(shapes, lengths):
            return torch.cat(list(values), 1)
        if lengths is not None or len({shape[1:] for shape in shapes}) > 1:
            raise ConfigurationError(
                f"{name} of micro-batches have shapes {shapes}, which cannot be put together; use num_microbatches=1, "
                "or return_outputs=False"
            )
        return torch.cat(list(values))
    if isinstance(first, Mapping):
        # Of a micro-batch without images there are no features of images.
        found = {key: [value[key] for value in values if key in value] for value in values for key in value}
        merged = {key: _merge(parts, key, lengths) for key, parts in found.items()}
        return type(first)(**{key: value for key, value in merged.items() if value is not None})
    if isinstance(first, tuple | list):
        return tuple(_merge(parts, name, lengths) for parts in zip(*values, strict=True))
    return None


def are_parts_of_row(shapes: Sequence[Sequence[int]], lengths: Sequence[int]) -> bool:
    """Return whether tensors of these shapes are [1, part, ...], with the rest the same."""
    return all(tuple(shape[:2]) == (1, length) for shape, length in zip(shapes, lengths, strict=True)) and (
        len({tuple(shape[2:]) for shape in shapes}) == 1
    )


def broadcast_outputs(outputs: Any, mesh: HybridMesh, source: int) -> Any:
    """Broadcast the outputs of rank `source` to all stages: a JSON header, then each tensor. No pickle."""
    group = mesh.group("pp")
    header = broadcast_json(None if outputs is None else _describe(outputs), group, source)
    mine = iter(()) if outputs is None else _tensors(outputs)

    def receive(dtype: str, shape: list[int]) -> Tensor:
        tensor = next(mine, None)
        if tensor is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, source, group=group)
        return tensor

    def build(node: dict[str, Any] | None) -> Any:
        if node is None:
            return None
        if "dtype" in node:
            return receive(node["dtype"], node["shape"])
        if "tuple" in node:
            return tuple(map(build, node["tuple"]))
        return _output_class(*node["class"])(**{key: build(each) for key, each in node["fields"].items()})

    return build(header)


def _describe(value: Any) -> dict[str, Any] | None:
    """Describe nested outputs in a JSON-serializable form."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        cls = type(value)
        return {
            "class": [cls.__module__, cls.__qualname__],
            "fields": {key: _describe(each) for key, each in value.items()},
        }
    return None if value is None else {"tuple": [_describe(each) for each in value]}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _output_class(module: str, name: str) -> type:
    """Return transformers' output class of that name; dict for any other module."""
    if not module.startswith("transformers."):
        return dict
    return getattr(importlib.import_module(module), name)
