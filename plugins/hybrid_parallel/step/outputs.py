"""Outputs of a boosted model: of micro-batches, merged; on the last stage, for all; and of whole sequences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from shardformer.context_parallel.zigzag import ZigzagSharding
from shardformer.distributed.blocks import joined_blocks
from shardformer.distributed.collectives import gather_from_region
from shardformer.distributed.process_groups import broadcast_json
from shardformer.layers.embedding import VocabParallelLMHead

LOSS, AUX_LOSS = "loss", "aux_loss"
CACHE_WITHHELD = "is not filled by the passes of a pipeline; use model.generate(…), which keeps a cache on each stage"
SCORES_WITHHELD = "lies on the stages, each with that of its own layers; outputs.aux_loss is that of all"
ROUTERS_WITHHELD = "needs the router scores of all stages for whole sequences, which no rank has"
_WITHHELD = "withheld"
_PLAINLY = "call the model with pp_size=1 (a checkpoint opens under any layout)"


def describe_outputs(
    results: Sequence[Mapping[str, Any]], coupled: Collection[str], rows: int, lengths: Sequence[int] | None
) -> dict[str, Any]:
    """Describe outputs in a JSON-serializable form, by name and in order.

    Args:
        coupled: names of outputs whose rows depend on other samples of the batch.
        rows: number of samples; 0 for a placeholder.
        lengths: tokens of each micro-batch, if they are parts of one row.
    """
    described = {}
    for name in dict.fromkeys(name for result in results for name in result):
        if any(name not in result for result in results):
            described[name] = _withheld(f"is of some of {len(results)} micro-batches alone; {_PLAINLY}")
        elif name in coupled and len(results) > 1:
            described[name] = _withheld(
                f"compares all samples of a batch, which is cut into {len(results)} micro-batches; compute it from the "
                "embeddings among the outputs, or use num_microbatches=1"
            )
        else:
            leaf = partial(_describe_tensors, is_sum=name == LOSS, num_rows=rows, lengths=lengths)
            described[name] = _describe([result[name] for result in results], leaf)
    return described


def in_order(described: Mapping[str, Any], not_made: Mapping[str, str], fields: Sequence[str]) -> dict[str, Any]:
    """Return descriptions in the order of the plain model's outputs, with those of its `fields` that no stage makes."""
    nodes = {name: _withheld(not_made[name]) for name in fields if name in not_made} | {**described}
    first = [name for name in (LOSS, AUX_LOSS) if name not in fields]
    return {name: nodes[name] for name in dict.fromkeys([*first, *fields, *described]) if name in nodes}


def reason_withheld(node: Any) -> str | None:
    """Return why an output cannot be read, as the end of a sentence that begins with its name; None if it can."""
    if node is None or "dtype" in node:
        return None
    if "differ" in node:
        return (
            f"has shapes {node['differ']} in micro-batches, which cannot be put together; use num_microbatches=1, or "
            "do not read it"
        )
    inner = node["fields"].values() if "fields" in node else node.get("items", ())
    return node.get(_WITHHELD) or next(filter(None, map(reason_withheld, inner)), None)


def build(node: Any, make: Callable[[Mapping[str, Any]], Tensor]) -> Any:
    """Build an output from its description; `make` returns each tensor."""
    if node is None:
        return None
    if "fields" in node:
        return _output_class(*node["class"])(**{key: build(each, make) for key, each in node["fields"].items()})
    if "items" in node:
        return (list if node["class"] == "list" else tuple)(build(each, make) for each in node["items"])
    return make(node)


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors of an output, in the order in which `build` makes them."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [leaf for each in inner for leaf in leaves(each)]


def joined(parts: Sequence[Tensor], is_sum: bool, lengths: Sequence[int] | None) -> Tensor:
    """Return the parts of an output together: their sum, their rows, or the tokens of one row (`lengths`)."""
    if is_sum:
        return torch.stack(list(parts)).sum(0)
    return torch.cat(list(parts), 0 if lengths is None else 1) if parts[0].dim() else parts[0].contiguous()


def _describe(values: Sequence[Any], leaf: Callable[[Sequence[Tensor]], dict[str, Any]]) -> Any:
    """Describe the parts of an output in micro-batches; `leaf` describes those of a tensor."""
    first = values[0]
    if first is None and all(value is None for value in values):
        return None
    if any(type(value) is not type(first) for value in values):
        return _withheld(f"is of some of {len(values)} micro-batches alone; {_PLAINLY}")
    if isinstance(first, Tensor):
        return leaf(values)
    cls = type(first)
    if cls.__module__.startswith("shardformer."):
        return _withheld(f"is of an earlier stage, which sends what the model reads of it alone; {_PLAINLY}")
    if isinstance(first, Mapping) and all(isinstance(key, str) and key in value for key in first for value in values):
        fields = {key: _describe([value[key] for value in values], leaf) for key in first}
        return {"class": [cls.__module__, cls.__qualname__], "fields": fields}
    if cls in (tuple, list) and all(len(value) == len(first) for value in values):
        return {"class": cls.__name__, "items": [_describe(parts, leaf) for parts in zip(*values, strict=True)]}
    return _withheld(f"is a {cls.__name__}, which a pipeline does not send between ranks; {_PLAINLY}")


def _describe_tensors(
    values: Sequence[Tensor], is_sum: bool, num_rows: int, lengths: Sequence[int] | None
) -> dict[str, Any]:
    shapes = [list(value.shape) for value in values]
    shape = shapes[0]
    if not is_sum and len(values) > 1:
        if not shape:
            return _withheld(f"is one number of each micro-batch; use num_microbatches=1, or {_PLAINLY}")
        if lengths is not None:
            if not are_parts_of_row(shapes, lengths):
                return {"differ": shapes}
            shape = [1, sum(lengths), *shape[2:]]
        elif any(each[1:] != shape[1:] for each in shapes):
            return {"differ": shapes}
    if shape and not is_sum and lengths is None:
        shape = [sum(each[0] for each in shapes), *shape[1:]]
        held = [each[0] for each in shapes if each[0]]  # placeholders hold nothing
        rows = [len(part) for part in torch.arange(num_rows).tensor_split(len(held) or 1)]
        uneven = any(count * num_rows != shape[0] * part for count, part in zip(held, rows, strict=False))
        if uneven or _is_by_layer([each for each in shapes if each[0]], rows):
            return _withheld(f"has shapes {shapes} in micro-batches, which have no samples along dim 0; {_PLAINLY}")
    return {
        "dtype": str(values[0].dtype).removeprefix("torch."),
        "shape": shape,
        "needs_grad": any(value.requires_grad for value in values),
    }


def _is_by_layer(shapes: Sequence[Sequence[int]], rows: Sequence[int]) -> bool:
    """Return whether parts are [layers, rows, ...]; if of equal sizes, they look like several rows of a sample."""
    return [shape[0] for shape in shapes] != rows and [shape[1] for shape in shapes if len(shape) > 1] == rows


def _withheld(reason: str) -> dict[str, str]:
    return {_WITHHELD: reason}


@dataclass
class OutputGradients:
    """What the backward pass of a micro-batch starts from: its outputs, and gradients of the user's loss."""

    result: Mapping[str, Any]  # outputs of the micro-batch, with their graph
    index: int  # of the micro-batch
    num_microbatches: int  # of the batch
    lengths: tuple[int, ...] | None  # tokens of each micro-batch, if they are parts of one row
    grads: Mapping[tuple[str, int], Tensor]  # (output, position in it) -> gradient for the whole batch
    requires_grad: bool = True

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return outputs of the micro-batch with their gradients."""
        pairs = []
        for (name, position), grad in self.grads.items():
            tensor = leaves(self.result[name])[position]
            if tensor.requires_grad:
                pairs.append((tensor, grad if name == LOSS or not grad.dim() else self._part(grad)))
        return pairs

    def _part(self, grad: Tensor) -> Tensor:
        if self.lengths is not None:
            return grad.split(self.lengths, 1)[self.index]
        return grad.tensor_split(self.num_microbatches)[self.index]


def with_whole_logits(outputs: Any, module: nn.Module) -> Any:
    """Return `outputs` of `module` with logits gathered over the vocabulary-parallel ranks."""
    head = next((each for each in module.modules() if isinstance(each, VocabParallelLMHead)), None)
    if head is None or not isinstance(outputs, Mapping):
        return outputs

    def whole(value: Any, key: Any = "") -> Any:
        if isinstance(value, Mapping):  # also of a language model inside
            return _mapped(value, whole)
        if not str(key).endswith("logits"):
            return value
        local_rows = head.weight.shape[1 if head.transposed else 0]
        value = joined_blocks(value, -1)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != local_rows:
            return value
        return gather_from_region(value, value.dim() - 1, head.group)[..., : head.full_out_features]

    return whole(outputs)


def with_whole_sequences(outputs: Any, axis: ZigzagSharding | None) -> Any:
    """Gather outputs of this rank's part of each sequence; None for `axis` if they are of whole sequences."""
    if axis is None:
        return outputs
    length = axis.latest.length
    part = 2 * axis.chunk(length)

    def whole(value: Any, key: Any = "") -> Any:
        if isinstance(value, Mapping):
            return _mapped(value, whole)
        is_part = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == part
        return axis.gather(value, length) if is_part else value

    return whole(outputs)


def _mapped(outputs: Mapping[Any, Any], function: Callable[[Any, Any], Any]) -> Any:
    """Return outputs of the same class, with what `function` makes of each value and its name."""
    made = copy(outputs)
    for key, value in outputs.items():
        made[key] = function(value, key)
    return made


_NOT_FETCHED = object()


class WithheldError(ConfigurationError, AttributeError):
    """An output that the plain model has and a pipeline does not give; `hasattr` finds none."""


@dataclass(frozen=True)
class Withheld:
    """Stands in loops over outputs at the place of one that cannot be read; every use of it says why."""

    _name: str
    _reason: str

    def __getattr__(self, attribute: str) -> Any:
        raise WithheldError(f"outputs.{self._name} {self._reason}")


class StageOutputs(dict[str, Any]):
    """Outputs by name, by attribute and by position, as transformers' `ModelOutput`; each is fetched when first read.

    Reading a value for the first time is collective: all ranks of the pipeline must read it.

    Args:
        withheld: name -> why the output of the plain model cannot be read; in loops it has its place (`Withheld`).
    """

    def __init__(self, names: Iterable[str], fetch: Callable[[str], Any], withheld: Mapping[str, str]) -> None:
        super().__init__(dict.fromkeys(names, _NOT_FETCHED))
        # Not in the mapping: `vars` would list it among the outputs.
        object.__setattr__(self, "_fetch", fetch)
        object.__setattr__(self, "_withheld", withheld)

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key] if isinstance(key, slice) else self[list(self.keys())[key]]
        self._refuse_withheld(key)
        value = super().__getitem__(key)
        if value is _NOT_FETCHED:
            value = self._fetch(key)
            self[key] = value
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"the model's outputs have no {name}")
        self._refuse_withheld(name)
        if name in self:
            return self[name]
        return None  # as an optional field of a `ModelOutput`

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def _refuse_withheld(self, name: str) -> None:
        if name in self._withheld:
            raise WithheldError(f"outputs.{name} {self._withheld[name]}")

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __repr__(self) -> str:
        """Name the outputs without fetching them."""
        return f"{type(self).__name__}({', '.join(self.keys())})"

    def get(self, key: str, default: Any = None) -> Any:
        """Return an output, or `default` if the model has none of that name."""
        self._refuse_withheld(key)
        return self[key] if key in self else default  # noqa: SIM401 (dict.get would not fetch it)

    def pop(self, key: str, *default: Any) -> Any:
        """Fetch and remove an output."""
        if key in self:
            default = (self[key],)
            del self[key]
        elif not default:
            raise KeyError(key)
        return default[0]

    def values(self) -> list[Any]:
        """Fetch and return all outputs."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[str, Any]]:
        """Fetch and return all outputs with their names."""
        withheld = self._withheld
        return [(name, Withheld(name, withheld[name]) if name in withheld else self[name]) for name in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        """Fetch and return all outputs in order."""
        return tuple(self.values())


# ----- outputs of micro-batches -----


def detached(outputs: Any) -> Any:
    """Detach the tensors of `outputs`, which may be nested in mappings and tuples; other values become None."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, Mapping):
        return type(outputs)(**{key: detached(value) for key, value in outputs.items()})
    return tuple(map(detached, outputs)) if isinstance(outputs, tuple | list) else None


def merge_outputs(outputs: Sequence[Any], lengths: Sequence[int] | None = None, rows: Sequence[int] = ()) -> Any:
    """Concatenate the outputs of micro-batches along the samples; scalars and caches in them are left out.

    Args:
        lengths: tokens of each micro-batch if they are parts of one row, whose outputs [1, part, ...] are concatenated
            along the tokens.

    Raises:
        ConfigurationError: if values of micro-batches differ in more than the number of samples, or of tokens, or have
            the samples along dim 1.
    """
    if isinstance(outputs[0], Tensor) and not outputs[0].dim():
        return torch.stack(list(outputs))
    return _merge(outputs, "outputs", lengths, list(rows))


def _merge(values: Sequence[Any], name: str, lengths: Sequence[int] | None, rows: list[int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        shapes = [tuple(value.shape) for value in values]
        if lengths is not None and "attention" not in name and are_parts_of_row(shapes, lengths):
            return torch.cat(list(values), 1)
        by_layer = len(rows) > 1 and _is_by_layer(shapes, rows)
        if lengths is not None or by_layer or len({shape[1:] for shape in shapes}) > 1:
            raise ConfigurationError(
                f"{name} of micro-batches have shapes {shapes}, which cannot be put together; use num_microbatches=1, "
                "or return_outputs=False"
            )
        return torch.cat(list(values))
    if isinstance(first, Mapping):
        # Of a micro-batch without images there are no features of images.
        found = {key: [value[key] for value in values if key in value] for value in values for key in value}
        merged = {key: _merge(parts, key, lengths, rows) for key, parts in found.items()}
        return type(first)(**{key: value for key, value in merged.items() if value is not None})
    if isinstance(first, tuple | list):
        return tuple(_merge(parts, name, lengths, rows) for parts in zip(*values, strict=True))
    return None


def are_parts_of_row(shapes: Sequence[Sequence[int]], lengths: Sequence[int]) -> bool:
    """Return whether tensors of these shapes are [1, part, ...], with the rest the same."""
    return all(tuple(shape[:2]) == (1, length) for shape, length in zip(shapes, lengths, strict=True)) and (
        len({tuple(shape[2:]) for shape in shapes}) == 1
    )


def broadcast_outputs(outputs: Any, mesh: HybridMesh, source: int) -> Any:
    """Broadcast the outputs of rank `source` to all stages: a JSON header, then each tensor. No pickle."""
    group = mesh.group("pp")
    header = broadcast_json(None if outputs is None else _describe([outputs], _describe_whole), group, source)
    mine = iter(leaves(outputs))

    def receive(leaf: Mapping[str, Any]) -> Tensor:
        tensor = next(mine, None)
        if tensor is None:
            tensor = torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device=mesh.device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, source, group=group)
        return tensor

    return build(header, receive)


def _describe_whole(values: Sequence[Tensor]) -> dict[str, Any]:
    return {"dtype": str(values[0].dtype).removeprefix("torch."), "shape": list(values[0].shape)}


def _output_class(module: str, name: str) -> type:
    """Return transformers' output class of that name; dict for any other module."""
    if not module.startswith("transformers."):
        return dict
    return getattr(importlib.import_module(module), name)
