"""What a system of the league is, and the training loop of those that change a model in place."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from benchmarks.league.outcome import refusals
from plugins.hybrid_parallel.verify.module_outputs import OutputLog
from plugins.hybrid_parallel.verify.propose import trace_from_json, trace_to_json
from plugins.hybrid_parallel.verify.train import Arrays, RecordedStep, Trace, VerifyCase
from shardformer.distributed.process_groups import all_gather_json

LEARNING_RATE = 0.05  # of `train_reference`


@dataclass(frozen=True)
class Trained:
    """Result of a training.

    Attributes:
        traces: of all ranks, or of one that has everything whole.
        is_cut: whether a rank had less than the whole model.
        seconds: of the last step.
    """

    traces: list[Trace]
    is_cut: bool
    seconds: float


class System(ABC):
    """A way to train a model; all of them run plain SGD on the same batches.

    Attributes:
        is_explained: whether a class that is wrong is trained again, to find the first module that differs.
    """

    is_explained = True

    def why_not(self, tp_size: int, pp_size: int) -> str:
        """Return why it trains no model under this layout; empty if it trains some."""
        return ""

    @abstractmethod
    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Train a tiny model on this rank.

        Args:
            case: the model, its batches and the number of steps.
            tp_size, pp_size: the layout; their product is the number of ranks.
            is_logged: record the outputs of modules too, where the system has modules of the same names.

        Raises:
            RefusedError: the system does not take the model or the layout.
        """


class Library(System):
    """A library that changes a model in place, so that a step of plain SGD trains it."""

    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Train a tiny model."""
        whole = case.tiny_model.build()
        batches = [case.tiny_model.batch(whole, step, case.rows) for step in range(case.steps)]
        shapes = {name: tuple(each.shape) for name, each in whole.named_parameters(remove_duplicate=False)}
        with refusals():
            model = self.prepared(whole, tp_size)
        log = _LocalLog(model) if is_logged else None
        named = dict(model.named_parameters(remove_duplicate=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
        trace, seconds = Trace(tp_rank=dist.get_rank()), 0.0
        for batch in batches:
            start = time.perf_counter()
            with self.around_step():
                loss = model(**batch).loss
                loss.backward()
                self.after_backward(model)
            seconds = time.perf_counter() - start
            gradients = {n: self.whole(model, each, each.grad) for n, each in named.items() if each.grad is not None}
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - start
            outputs = log.take() if log is not None else []
            trace.steps.append(RecordedStep(float(to_array(loss.detach())), outputs, assembled(gradients, shapes), {}))
        traces = [trace_from_json(each) for each in all_gather_json(trace_to_json(trace))]
        return Trained(traces, any(all_gather_json(is_cut(shapes, model.named_parameters()))), seconds)

    def why_not(self, tp_size: int, pp_size: int) -> str:
        """Return why it has no stages, for a layout that needs them."""
        return self.why_no_stages() if pp_size > 1 else ""

    @abstractmethod
    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Return the model as the library shards it; its errors count as in `refusals`."""

    def why_no_stages(self) -> str:
        """Why it does not train a pipeline of stages."""
        return "it has no pipeline parallelism"

    def around_step(self) -> AbstractContextManager[Any]:
        """Return a context for the forward and the backward pass."""
        return nullcontext()

    def after_backward(self, model: nn.Module) -> None:
        """Do what the library asks for between the backward pass and the optimizer's step."""

    def whole(self, model: nn.Module, param: nn.Parameter, value: Tensor) -> numpy.ndarray:
        """Return a parameter's value or gradient as the library gathers it."""
        return to_array(value)


class _LocalLog(OutputLog):
    """Outputs of modules that may return DTensors; each is recorded whole."""

    def _after(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        def plain(value: Any) -> Any:
            return value.detach().full_tensor() if isinstance(value, DTensor) else value

        super()._after(name, module, args, tree_map(plain, output))


def to_array(tensor: Tensor) -> numpy.ndarray:
    """Return a tensor as an array, whole if it is a DTensor."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().numpy().copy()


def assembled(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Concatenate what a library leaves in parts on its ranks, where one dimension is shorter than the whole one."""
    own = {name: each for name, each in arrays.items() if each.shape != shapes.get(name)}
    sent = all_gather_json(trace_to_json(Trace(steps=[RecordedStep(0.0, [], own, {})])))
    parts = [trace_from_json(each).steps[0].gradients for each in sent]
    found = dict(arrays)
    for name in own:
        pieces = [each[name] for each in parts if name in each]
        expected = shapes.get(name, ())
        shorter = [
            dim for dim, size in enumerate(expected) if pieces[0].ndim == len(expected) and pieces[0].shape[dim] != size
        ]
        if len(shorter) == 1:
            found[name] = numpy.concatenate(pieces, axis=shorter[0])
    return found


def is_cut(shapes: Mapping[str, tuple[int, ...]], params: Iterable[tuple[str, nn.Parameter]]) -> bool:
    """Return whether this rank has less than all elements of some parameter; `shapes` are those of the whole model."""
    sizes = {name: int(numpy.prod(shape, dtype=int)) for name, shape in shapes.items()}
    return any(_local(each).numel() < sizes.get(name, 0) for name, each in params)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
