"""The systems of the league: each trains a tiny model on this rank, and returns whole gradients and weights.

A system gets the model as its users would give it, and the settings that its documentation recommends for training.
All of them run plain SGD on the same batches.
"""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from benchmarks.league.outcome import RefusedError
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.distributed.agreement import all_gather_json, broadcast_json
from plugins.hybrid_parallel.verify.trace_json import trace_from_json, trace_to_json
from plugins.hybrid_parallel.verify.train import RecordedStep, Trace, VerifyCase, train_reference

LEARNING_RATE = 0.05  # of `train_reference`


class Trained:
    """Result of a training.

    Args:
        traces: of all ranks, or of one that has everything whole.
        is_cut: whether a rank had less than the whole model.
        seconds: of the last step.
    """

    def __init__(self, traces: list[Trace], is_cut: bool, seconds: float) -> None:
        self.traces, self.is_cut, self.seconds = traces, is_cut, seconds


System = Callable[[VerifyCase, int, int], Trained]


def plain(case: VerifyCase, tp_size: int, pp_size: int) -> Trained:
    """Plain transformers, a control: every class must be exact."""
    trace = train_reference(case)
    model = case.tiny_model.build()
    batch, seconds = case.tiny_model.batch(model, 0, case.rows), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(case.steps):
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
    return Trained([trace], is_cut=True, seconds=seconds)


def ours(case: VerifyCase, tp_size: int, pp_size: int) -> Trained:
    """This package."""
    plugin = HybridParallelPlugin(tp_size=tp_size, pp_size=pp_size, num_microbatches=pp_size)
    booster, whole = Booster(plugin=plugin), case.tiny_model.build()
    batches = [case.tiny_model.batch(whole, step, case.rows) for step in range(case.steps)]
    sizes = {name: each.numel() for name, each in whole.named_parameters()}
    model, optimizer = booster.boost(whole, torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE))
    trace, seconds = Trace(plugin.stage_index, plugin.dp_rank, plugin.tp_rank), 0.0
    for batch in batches:
        start = time.perf_counter()
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
        seconds = time.perf_counter() - start
        gradients = {name: _whole(each) for name, each in optimizer.full_gradients().items()}
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
        trace.steps.append(RecordedStep(loss.item(), [], gradients, {}))
    is_cut = len(list(model.parameters())) < len(sizes) or _is_cut(sizes, model)
    traces = [trace_from_json(each) for each in all_gather_json(trace_to_json(trace))]
    return Trained(traces, any(all_gather_json(is_cut)), seconds)


def faulty(case: VerifyCase, tp_size: int, pp_size: int) -> Trained:
    """This package with a gradient that is one percent too large, a control: every class must be wrong."""
    found = ours(case, tp_size, pp_size)
    for trace in found.traces:
        gradients = trace.steps[0].gradients
        largest = max(gradients, key=lambda name: float(abs(gradients[name]).max()), default=None)
        if largest is not None:
            gradients[largest] = gradients[largest] * 1.01
    return found


class _Library(ABC):
    """A library that changes a model in place, so that a step of plain SGD trains it."""

    def __call__(self, case: VerifyCase, tp_size: int, pp_size: int) -> Trained:
        """Train a tiny model."""
        if pp_size > 1:
            raise RefusedError("it has no pipeline parallelism for training")
        whole = case.tiny_model.build()
        batches = [case.tiny_model.batch(whole, step, case.rows) for step in range(case.steps)]
        sizes = {name: each.numel() for name, each in whole.named_parameters()}
        model = self.prepared(whole, tp_size)
        named = dict(model.named_parameters(remove_duplicate=False))
        optimizer, trace, seconds = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False), Trace(), 0.0
        for batch in batches:
            start = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            seconds = time.perf_counter() - start
            gradients = {
                name: self.whole(model, each, each.grad) for name, each in named.items() if each.grad is not None
            }
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - start
            weights = {name: self.whole(model, each, each.detach()) for name, each in named.items()}
            trace.steps.append(RecordedStep(float(_whole(loss.detach())), [], gradients, weights))
        return Trained([trace], _is_cut(sizes, model), seconds)

    @abstractmethod
    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Return the model as the library shards it.

        Raises:
            RefusedError: the library does not take it.
        """

    def whole(self, model: nn.Module, param: nn.Parameter, value: Tensor) -> Any:
        """Return a parameter's value or gradient, whole, as an array."""
        return _whole(value)


class TransformersPlan(_Library):
    """transformers' own tensor parallelism: `from_pretrained(tp_plan="auto")`."""

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Load the model from a folder, as its documentation does."""
        if not _plan_of(whole):
            raise RefusedError("the class has no tp_plan")
        with _shared_folder() as folder:
            if dist.get_rank() == 0:
                whole.save_pretrained(folder)
            dist.barrier()
            model = type(whole).from_pretrained(folder, tp_plan="auto", dtype=next(whole.parameters()).dtype)
            dist.barrier()
        _same_weights(model, whole)
        return model.train()


class TorchPlan(_Library):
    """torch's `parallelize_module` with the plan that transformers has for the class."""

    _STYLES: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
    }

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Translate the plan, style by style."""
        plan = _plan_of(whole)
        unknown = sorted(set(plan.values()) - set(self._STYLES))
        if not plan:
            raise RefusedError("the class has no tp_plan")
        if unknown:
            raise RefusedError(f"torch has no style {unknown[0]!r} of this plan")
        styles = {name: self._STYLES[style]() for name, style in plan.items()}
        return parallelize_module(whole, init_device_mesh("cpu", (tp_size,)), styles)


class AutoTP(_Library):
    """DeepSpeed's tensor parallelism for training, AutoTP."""

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Let DeepSpeed find the layers to cut."""
        import deepspeed

        model = deepspeed.tp_model_init(whole, tp_size=tp_size, dtype=next(whole.parameters()).dtype)
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "tensor_parallel": {"autotp_size": tp_size},
                "zero_optimization": {"stage": 0},
            },
        )
        return engine.module

    def whole(self, model: nn.Module, param: nn.Parameter, value: Tensor) -> Any:
        """Gather by DeepSpeed's own context, which makes the values of a parameter of its layers whole."""
        from deepspeed.module_inject.layers import GatherReplacedLayerParams

        if not hasattr(param, "gather_params"):
            return _whole(value)
        own, param.data = param.data, value.clone()
        with GatherReplacedLayerParams([param], model, enabled=True):
            found = _whole(param)
        param.data = own
        return found


def _is_cut(sizes: Mapping[str, int], model: nn.Module) -> bool:
    """Return whether this rank has less than all elements of some parameter; `sizes` are those of the whole model."""
    return any(_local(each).numel() < sizes.get(name, 0) for name, each in model.named_parameters())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Any:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().numpy().copy()


def _plan_of(model: nn.Module) -> dict[str, str]:
    return dict(getattr(model, "tp_plan", None) or {})


@contextmanager
def _shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="league-") as own:
        yield Path(broadcast_json(own))
        dist.barrier()


@torch.no_grad()
def _same_weights(model: nn.Module, whole: nn.Module) -> None:
    """Give the loaded model the values of the whole one: a class may not read every weight that it wrote."""
    values = dict(whole.named_parameters(remove_duplicate=False))
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in values and isinstance(param, DTensor) and param.shape == values[name].shape:
            cut = torch.distributed.tensor.distribute_tensor(values[name].detach(), param.device_mesh, param.placements)
            param.to_local().copy_(cut.to_local())
        elif name in values and param.shape == values[name].shape:
            param.copy_(values[name])


SYSTEMS: dict[str, System] = {
    "plain transformers": plain,
    "ours": ours,
    "ours with a fault": faulty,
    "transformers tp_plan": TransformersPlan(),
    "torch parallelize_module": TorchPlan(),
    "DeepSpeed AutoTP": AutoTP(),
}
