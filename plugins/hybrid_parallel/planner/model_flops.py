"""FLOPs of a model's forward pass, counted by the planner's rules while the model trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.planner.device import PRESETS
from plugins.hybrid_parallel.planner.op_recorder import count_operator
from shardformer.peft import model_inside

Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
_MOST_SHAPES = 8  # batches of other lengths are interpolated between those that were counted


class ModelFlops:
    """Counts matrix products and attention of one sample, without weights or values (fake tensors)."""

    def __init__(self, model: HybridParallelModel) -> None:
        self.model_class, self.config = type(model_inside(model.unwrap())), model.origin.config
        self._counted: dict[Shapes, float | None] = {}

    def of(self, batch: Mapping[str, Any]) -> float | None:
        """Return the FLOPs of a forward pass of `batch`; None if the model cannot be looked at."""
        tensors = {name: each for name, each in batch.items() if isinstance(each, Tensor) and each.dim()}
        rows = max((len(each) for each in tensors.values()), default=0)
        shapes = tuple((name, tuple(each.shape[1:]), each.dtype) for name, each in sorted(tensors.items()))
        if self.config is None or not rows:
            return None
        if shapes not in self._counted and len(self._counted) < _MOST_SHAPES:
            self._counted[shapes] = self._count(shapes)
        a_sample = self._counted[shapes] if shapes in self._counted else self._interpolated(shapes)
        return None if a_sample is None else a_sample * rows

    def _count(self, shapes: Shapes) -> float | None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        counter = FlopCounter()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                model = self.model_class(self.config)
                batch = {name: torch.zeros(1, *shape, dtype=dtype) for name, shape, dtype in shapes}
                with counter:
                    model(**batch)
        except Exception:  # a model may read values, which fake tensors do not have
            return None
        return counter.flops

    def _interpolated(self, shapes: Shapes) -> float | None:
        """Return the FLOPs between two lengths that were counted; attention makes them a little more than linear."""
        length = _length(shapes)
        known = sorted((_length(each), flops) for each, flops in self._counted.items() if flops)
        if not known:
            return None
        below = max((each for each in known if each[0] <= length), default=known[0])
        above = min((each for each in known if each[0] >= length), default=known[-1])
        if below[0] == above[0]:
            return below[1] * length / max(below[0], 1)
        share = (length - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


class FlopCounter(TorchDispatchMode):
    """Dispatch mode that adds up the FLOPs of operators, in `flops`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if inputs and outputs and not func.is_view:
            self.flops += count_operator(func, args, kwargs or {}, inputs, outputs, result).flops
        return result


def peak_flops(precision: str) -> float | None:
    """Return the FLOP/s that this rank's device promises by its vendor's specification; None for an unknown device."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    found = next((device for known, device in PRESETS.items() if known.lower() in name), None)
    return None if found is None else found.flops.get("bf16" if precision == "fp8" else precision)


def _length(shapes: Shapes) -> int:
    return max((shape[0] for _, shape, _ in shapes if shape), default=1)
