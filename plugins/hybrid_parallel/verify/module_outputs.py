"""Record the outputs of modules by hooks in both trainings, assemble them from all ranks, and compare them.

Also, which lines of modeling code ran.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardformer.cross_entropy.fused_linear import DeferredLogits
from shardformer.shard_spec import ShardSpec, spec_of
from shardformer.stages.placeholders import StagePlaceholder
from shardformer.utils.untraced import call_through, in_backward

_FLOOR = 1e-6  # lower limit of the scale that a difference is relative to


@dataclass
class Output:
    """First tensor that one call of a module returned on this rank."""

    name: str  # name of the module
    kind: str  # name of its class
    spec: ShardSpec | None  # sharding of the module's weight; None if it is not sharded
    parts: dict[int, numpy.ndarray] = field(default_factory=dict)  # index of the micro-batch -> values


class OutputLog:
    """Recorder of the outputs of all modules of a model, except for placeholders of modules on other stages."""

    def __init__(self, model: nn.Module) -> None:
        self._outputs: dict[tuple[str, int], Output] = {}
        self.begin_microbatch(0)
        for name, module in model.named_modules():
            if not isinstance(module, StagePlaceholder):
                module.register_forward_hook(partial(self._after, name))

    def begin_microbatch(self, index: int) -> None:
        """Start a forward or backward pass of a micro-batch."""
        self._microbatch, self._calls = index, Counter[str]()

    def take(self) -> list[Output]:
        """Return and clear the outputs recorded since the last call, in the order in which modules returned."""
        found, self._outputs = list(self._outputs.values()), {}
        self.begin_microbatch(0)
        return found

    def _after(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        tensor = next(_tensors(output), None)
        is_recomputed = in_backward()
        # A tensor with Python attributes is one that a collective is still writing to; of deferred logits the loss has
        # chunks alone.
        if tensor is None or is_recomputed or vars(tensor) or isinstance(tensor, DeferredLogits):
            return
        key = name, self._calls[name]
        self._calls[name] += 1
        if key not in self._outputs:
            weight = getattr(module, "weight", None)
            spec = spec_of(weight) if isinstance(weight, Tensor) else None
            cut = spec if spec is not None and spec.dim is not None else None
            self._outputs[key] = Output(name, type(module).__name__, cut)
        self._outputs[key].parts[self._microbatch] = tensor.detach().cpu().numpy().copy()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "loss":
                yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def difference(
    expected: Output, replicas: Sequence[Sequence[Output]], mask: Tensor | None, as_sum: bool = False
) -> float | None:
    """Return the largest relative difference between an output and the one that the ranks of a stage computed.

    Args:
        replicas: outputs of the same module on the ranks, [dp][tp].
        mask: [batch, seq], 1 for tokens and 0 for padding.
        as_sum: treat the outputs of tensor-parallel ranks as partial sums.

    Returns:
        The difference; None if the ranks' pieces cannot be assembled to a tensor of the expected shape.
    """
    whole = _joined([expected])
    over_tp = [_joined(pieces) for pieces in zip(*replicas, strict=True)]
    if whole is None or any(piece is None for piece in over_tp):
        return None
    if as_sum:
        alike = all(piece.shape == whole.shape for piece in over_tp)
        return relative(torch.stack(over_tp).sum(0), whole, mask) if alike else None
    candidates = _candidates(over_tp, whole, [piece.spec for piece in replicas[0]])
    found = [max(relative(each, whole, mask) for each in candidate) for candidate in candidates]
    return min(found, default=None)


def relative(found: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """Return the largest difference of an element, relative to the largest element of `expected`."""
    if mask is not None and expected.dim() >= 2 and expected.shape[:2] == mask.shape:
        found, expected = found[mask.bool()], expected[mask.bool()]
    if not expected.numel():
        return 0.0
    # Equal infinities, such as -inf in masks, would give NaN.
    gap = torch.where(found == expected, 0.0, (found - expected).abs().double())
    gap = torch.where(found.isnan() & expected.isnan(), 0.0, gap)
    scale = max(expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0, _FLOOR)
    worst = gap.max().item() / scale
    return worst if worst == worst else float("inf")


def _joined(pieces: Sequence[Output]) -> Tensor | None:
    """Concatenate the micro-batches of all replicas; None if their shapes do not match."""
    parts = [torch.from_numpy(piece.parts[index]) for piece in pieces for index in sorted(piece.parts)]
    if len(parts) == 1:
        return parts[0]
    if len({(part.dim(), tuple(part.shape[1:])) for part in parts}) != 1 or not parts[0].dim():
        return None
    return torch.cat(parts)


def _candidates(pieces: list[Tensor], whole: Tensor, specs: list[ShardSpec | None]) -> Iterator[list[Tensor]]:
    """Yield the ways to assemble the pieces of tensor-parallel ranks; each is a list of tensors shaped like `whole`."""
    if all(piece.shape == whole.shape for piece in pieces):
        yield pieces
        return
    if all(
        piece.dim() and piece.shape[1:] == whole.shape[1:] and not len(piece) % max(len(whole), 1) for piece in pieces
    ):
        yield [part for piece in pieces for part in piece.split(len(whole))]  # repeated for every micro-batch
    if (assembled := _by_spec(pieces, whole, specs)) is not None:
        yield [assembled]
    for dim in range(whole.dim()):
        if all(piece.dim() == whole.dim() and _without(piece, dim) == _without(whole, dim) for piece in pieces):
            joined = torch.cat(pieces, dim)
            if joined.shape[dim] >= whole.shape[dim]:  # the rest is padding
                yield [joined.narrow(dim, 0, whole.shape[dim])]


def _by_spec(pieces: list[Tensor], whole: Tensor, specs: list[ShardSpec | None]) -> Tensor | None:
    """Assemble features sharded like the weight that computed them, possibly in several parts or with copies."""
    if not whole.dim() or any(spec is None or spec.full_shape[spec.dim] != whole.shape[-1] for spec in specs):
        return None
    if any(
        piece.shape[-1:] != spec.local_shape[spec.dim : spec.dim + 1] for piece, spec in zip(pieces, specs, strict=True)
    ):
        return None
    spec = specs[0]
    like_weight = ShardSpec(tuple(whole.shape), whole.dim() - 1, spec.parts, 0, spec.world_size, spec.copies)
    if any(piece.shape[:-1] != whole.shape[:-1] for piece in pieces):
        return None
    return like_weight.assemble(pieces)


def _without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


class OperatorLog(OutputLog):
    """Recorder of what the lines of a file return during the calls of one module.

    Operators that other files call are left out: those are this library's, or torch's, and may divide values in a way
    of their own.

    Args:
        model: the whole model or a rank's part.
        path: path of the module; nothing is recorded if it is on another stage.
    """

    def __init__(self, model: nn.Module, path: str, file: str) -> None:
        self._outputs = {}
        self.begin_microbatch(0)
        mode = _Lines(file, self._add)

        def call(own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            with mode:
                return own(*args, **kwargs)

        module = dict(model.named_modules()).get(path)
        if module is not None:
            call_through(module, call)

    def _add(self, line: str, output: Any) -> None:
        if isinstance(output, Tensor):
            self._after(line, _NOTHING, (), output.detach())


class _Lines(TorchFunctionMode):
    def __init__(self, file: str, add: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._file, self._add = file, add

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = function(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame.f_code.co_filename == self._file:
            with torch._C.DisableTorchFunction():
                name = getattr(function, "__name__", "operator")
                self._add(f"{name} in line {frame.f_lineno}", output)
        return output


_NOTHING = nn.Module()  # whose weight is not divided
_TORCH = os.path.dirname(torch.__file__)


_OF_TRANSFORMERS = re.compile(r"/transformers/models/\w+/modeling_\w+\.py$")  # towers of other families, too
_NO_PART_OF_A_STEP = ("__init__", "_init_weights")
FrameTrace = Callable[[FrameType, str, Any], Any]


class LinesRun:
    """Context manager that notes which lines run of the file of a model's class and of transformers' families."""

    def __init__(self, model_class: type[nn.Module]) -> None:
        self._file = getattr(sys.modules[model_class.__module__], "__file__", None)
        self._run: dict[CodeType, set[int]] = {}

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, value: Any) -> FrameTrace | None:
        code = frame.f_code
        is_modeling = code.co_filename == self._file or _OF_TRANSFORMERS.search(code.co_filename)
        if not is_modeling or code.co_name in _NO_PART_OF_A_STEP:
            return None
        run = self._run.setdefault(code, set())

        def trace(frame: FrameType, event: str, value: Any) -> FrameTrace:
            run.add(frame.f_lineno)
            return trace

        return trace

    def others(self) -> list[str]:
        """Return "FILE, FUNCTION: 79, 181-186" for each function that ran, but these lines of it."""
        found = []
        for code in sorted(self._run, key=lambda code: (code.co_filename, code.co_firstlineno)):
            lines = sorted({line for *_, line in code.co_lines() if line is not None} - {code.co_firstlineno})
            groups = [list(group) for ran, group in groupby(lines, self._run[code].__contains__) if not ran]
            ranges = (str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
            if groups:
                found.append(f"{Path(code.co_filename).name}, {code.co_qualname}: {', '.join(ranges)}")
        return found
