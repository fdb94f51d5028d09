"""Outputs of micro-batches on the last stage: descriptions by which other ranks allocate them, and reasons why not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugins.hybrid_parallel.pipeline.outputs import are_parts_of_row

LOSS, AUX_LOSS = "loss", "aux_loss"
CACHE_WITHHELD = "is not filled by the passes of a pipeline; use model.generate(…), which keeps a cache on each stage"
SCORES_WITHHELD = "lies on the stages, each with that of its own layers; outputs.aux_loss is that of all"
ROUTERS_WITHHELD = "needs the router scores of all stages for whole sequences, which no rank has"
_WITHHELD = "withheld"
_PLAINLY = "call the model with pp_size=1 (a checkpoint opens under any layout)"


def describe_outputs(
    results: Sequence[Mapping[str, Any]], coupled: Collection[str], rows: int, lengths: Sequence[int] | None
) -> dict[str, Any]:
    """Describe outputs in a JSON-serializable form, by name; those that are None are left out.

    Args:
        results: outputs of each micro-batch.
        coupled: names of outputs whose rows depend on other samples of the batch.
        rows: number of samples; 0 for a placeholder.
        lengths: tokens of each micro-batch, if they are parts of one row.
    """
    described = {}
    for name, value in {name: value for result in results for name, value in result.items()}.items():
        if any(name not in result for result in results):
            described[name] = _withheld(f"is of some of {len(results)} micro-batches alone; {_PLAINLY}")
        elif name in coupled and len(results) > 1:
            described[name] = _withheld(
                f"compares all samples of a batch, which is cut into {len(results)} micro-batches; compute it from the "
                "embeddings among the outputs, or use num_microbatches=1"
            )
        elif value is not None:
            described[name] = _describe([result[name] for result in results], name == LOSS, rows, lengths)
    return described


def reason_withheld(node: Any) -> str | None:
    """Return why an output cannot be read, as the end of a sentence that begins with its name; None if it can."""
    if isinstance(node, list):
        return next((reason for reason in map(reason_withheld, node) if reason is not None), None)
    if "differ" in node:
        return (
            f"has shapes {node['differ']} in micro-batches, which cannot be put together; use num_microbatches=1, or "
            "do not read it"
        )
    return node.get(_WITHHELD)


def build(node: Any, make: Callable[[Mapping[str, Any]], Tensor]) -> Any:
    """Build an output from its description; `make` returns each tensor."""
    return tuple(build(each, make) for each in node) if isinstance(node, list) else make(node)


def leaves(value: Any) -> list[Any]:
    """Return the tensors of an output, or of its description."""
    return list(_flat(value))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def joined(parts: Sequence[Tensor], is_sum: bool, lengths: Sequence[int] | None) -> Tensor:
    """Return the parts of an output together: their sum, their rows, or the tokens of one row (`lengths`)."""
    if is_sum:
        return torch.stack(list(parts)).sum(0)
    return torch.cat(list(parts), 0 if lengths is None else 1) if parts[0].dim() else parts[0].contiguous()


def _describe(values: Sequence[Any], is_sum: bool, num_rows: int, lengths: Sequence[int] | None) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return _describe_tensors(values, is_sum, num_rows, lengths)
    if type(first) in (tuple, list):
        return [_describe(parts, is_sum, num_rows, lengths) for parts in zip(*values, strict=True)]
    return _withheld(f"is a {type(first).__name__}, which a pipeline does not send between ranks; {_PLAINLY}")


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
        parts = torch.arange(num_rows).tensor_split(len(held) or 1)
        if any(count * num_rows != shape[0] * len(part) for count, part in zip(held, parts, strict=False)):
            return _withheld(f"has shapes {shapes} in micro-batches, which have no samples along dim 0; {_PLAINLY}")
    return {
        "dtype": str(values[0].dtype).removeprefix("torch."),
        "shape": shape,
        "needs_grad": any(value.requires_grad for value in values),
    }


def _withheld(reason: str) -> dict[str, str]:
    return {_WITHHELD: reason}


@dataclass
class OutputGradients:
    """What the backward pass of a micro-batch starts from: its outputs, and the gradients that the user's loss gives.

    Attributes:
        result: outputs of the micro-batch, with their graph.
        index: of the micro-batch.
        num_microbatches: of the batch.
        lengths: tokens of each micro-batch, if they are parts of one row.
        grads: (output, position in it) -> gradient for the whole batch.
    """

    result: Mapping[str, Any]
    index: int
    num_microbatches: int
    lengths: tuple[int, ...] | None
    grads: Mapping[tuple[str, int], Tensor]
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
