"""Pipeline parallelism of other libraries that can be pointed at a class of transformers as it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.utils._pytree import tree_map_only

from benchmarks.league.outcome import RefusedError, refusals
from benchmarks.league.system import LEARNING_RATE, System, Trained, is_cut, to_array
from plugins.hybrid_parallel.distributed.agreement import all_gather_json, broadcast_json
from plugins.hybrid_parallel.verify.trace_json import trace_from_json, trace_to_json
from plugins.hybrid_parallel.verify.train import RecordedStep, Trace, VerifyCase

Batch = Mapping[str, Any]


class TorchPipelining(System):
    """torch's `pipeline()`: it traces the model, and splits the graph in front of a layer.

    Args:
        num_microbatches: of a step. The loss of a step is the mean over micro-batches, as in its documentation.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches

    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Trace, split in the middle of the layers, and run GPipe."""
        if pp_size == 1:
            raise RefusedError("it has stages alone")
        if tp_size > 1:
            raise RefusedError("a traced graph has no modules for a tensor-parallel plan")
        whole = case.tiny_model.build()
        batches = [case.tiny_model.batch(whole, step, case.rows) for step in range(case.steps)]
        shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
        with refusals():
            split = {middle_layer(whole): SplitPoint.BEGINNING}
            example = {
                name: first_rows(value, case.rows // self.num_microbatches) for name, value in batches[0].items()
            }
            pipe = pipeline(_OnlyLoss(whole), (), example, split_spec={f"model.{k}": v for k, v in split.items()})
        stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
        schedule = ScheduleGPipe(stage, self.num_microbatches, loss_fn=lambda output, _: output)
        return run_stages(stage.submod, _Schedule(schedule, self.num_microbatches), batches, shapes)


class _Schedule:
    """A schedule of torch; the targets of its loss function are in the batch that the first stage gets."""

    def __init__(self, schedule: ScheduleGPipe, num_microbatches: int) -> None:
        self.schedule, self.num_microbatches = schedule, num_microbatches

    def step(self, batch: Batch) -> Tensor:
        """Run a step; the mean loss of micro-batches on the rank of the last stage."""
        if dist.get_rank() == 0:
            self.schedule.step(**batch)
            return torch.zeros(())
        losses: list[Tensor] = []
        self.schedule.step(target=torch.zeros(self.num_microbatches), losses=losses)
        return torch.stack(losses).mean()


class _OnlyLoss(nn.Module):
    """A class of transformers returns an object that is no output of a stage; the loss is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        """Return the loss. Later stages get no inputs of the model, so entries become values of the first one."""
        return self.model(**{name: tree_map_only(Tensor, torch.clone, each) for name, each in batch.items()}).loss


def run_stages(stage: nn.Module, schedule: Any, batches: list[Batch], shapes: Mapping[str, tuple[int, ...]]) -> Trained:
    """Train this rank's stage.

    Args:
        stage: what this rank has of the model.
        schedule: its `step(batch)` runs both passes and returns the loss, which counts on the last rank.
        batches: whole batches.
        shapes: parameter -> shape in the whole model.
    """
    optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE, foreach=False)
    named = {_own_name(name, shapes): each for name, each in stage.named_parameters(remove_duplicate=False)}
    trace, seconds = Trace(dist.get_rank()), 0.0
    for batch in batches:
        start = time.perf_counter()
        loss = schedule.step(batch)
        seconds = time.perf_counter() - start
        gradients = {name: to_array(each.grad) for name, each in named.items() if each.grad is not None}
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
        of_last = broadcast_json(float(to_array(loss.detach())), source=dist.get_world_size() - 1)
        trace.steps.append(RecordedStep(of_last, [], gradients, {}))
    traces = [trace_from_json(each) for each in all_gather_json(trace_to_json(trace))]
    has_less = len(set(named) & set(shapes)) < len(shapes) or is_cut(shapes, named.items())
    return Trained(traces, any(all_gather_json(has_less)), seconds)


def _own_name(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    return name if name in shapes else name.removeprefix("model.")  # of `_OnlyLoss`


def middle_layer(model: nn.Module) -> str:
    """Return the name of the layer in front of which half of the parameters of all layers lie.

    Raises:
        RefusedError: the model has no list of layers.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    layers = [f"{name}.{index}" for name in outer for index in range(len(model.get_submodule(name)))]
    sizes = [sum(param.numel() for param in model.get_submodule(layer).parameters()) for layer in layers]
    before = 0
    for layer, size in zip(layers, sizes, strict=True):
        if before and 2 * before >= sum(sizes):
            return layer
        before += size
    raise RefusedError("the model has no list of layers to split")


def first_rows(value: Any, rows: int) -> Any:
    """Return an example of a micro-batch of one entry of a batch."""
    return value[:rows] if isinstance(value, Tensor) and value.dim() else value
