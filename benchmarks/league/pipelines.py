"""Pipeline parallelism of other libraries that can be pointed at a class of transformers as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from torch.utils._pytree import tree_map_only

from benchmarks.league.outcome import RefusedError, refusals
from benchmarks.league.system import LEARNING_RATE, System, Trained, is_cut, to_array
from plugins.hybrid_parallel.verify.propose import trace_from_json, trace_to_json
from plugins.hybrid_parallel.verify.train import RecordedStep, Trace, VerifyCase
from shardformer.distributed.process_groups import all_gather_json, broadcast_json

Batch = Mapping[str, Any]


class TorchPipelining(System):
    """torch's `pipeline()`: it traces the model, and splits the graph in front of a layer.

    The trace is made without gradients: a region without them, as transformers' rotary embeddings have, becomes a
    graph of its own otherwise, which `pipeline()` cannot unflatten.

    Args:
        num_microbatches: of a step.
    """

    is_explained = False  # the modules of a traced graph record nothing under the model's names

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches

    def why_not(self, tp_size: int, pp_size: int) -> str:
        """It has stages alone."""
        if pp_size == 1:
            return "it has stages alone"
        return "a traced graph keeps the numbers of heads that a tensor-parallel plan divides" if tp_size > 1 else ""

    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Trace, split in the middle of the layers, and run GPipe."""
        whole = case.tiny_model.build()
        batches = [case.tiny_model.batch(whole, step, case.rows) for step in range(case.steps)]
        shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
        with refusals():
            split = {f"model.{middle_layer(whole)}": SplitPoint.BEGINNING}
            pipes = [_traced(_OnlyLoss(whole), batch, case.rows // self.num_microbatches, split) for batch in batches]
        stages = [pipe.build_stage(dist.get_rank(), torch.device("cpu")) for pipe in pipes]
        for other in stages[1:]:
            _share_parameters(stages[0].submod, other.submod)
        weighted = partial(ScheduleGPipe, n_microbatches=self.num_microbatches, loss_fn=lambda x, w: (x * w).sum())
        schedules = iter([weighted(stage) for stage in stages])
        return run_stages(stages[0].submod, _Schedules(schedules, whole, self.num_microbatches), batches, shapes)


@dataclass(frozen=True)
class _Schedules:
    """Schedules of torch, one a step, since a trace has the shapes of its example.

    Labels are in the batch that the first stage gets; the targets of the loss function are weights of micro-batches.
    """

    schedules: Iterator[ScheduleGPipe]
    whole: nn.Module
    num_microbatches: int

    def step(self, batch: Batch) -> Tensor:
        """Run a step; the loss of the batch on the rank of the last stage."""
        schedule, losses = next(self.schedules), []
        if dist.get_rank() == 0:
            schedule.step(**batch)
            return torch.zeros(())
        schedule.step(target=label_weights(self.whole, batch, self.num_microbatches), losses=losses)
        return torch.stack(losses).mean()


def label_weights(model: nn.Module, batch: Batch, num_microbatches: int) -> Tensor:
    """Weights of micro-batches, [num_microbatches], with which the mean of their losses is the mean over all labels.

    It holds for a loss that is a mean over the labels that are not -100.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return torch.ones(num_microbatches)
    if labels.dim() == 2 and _predicts_next(model):
        labels = labels[:, 1:]
    counts = torch.stack([(each != -100).sum() for each in labels.chunk(num_microbatches)])
    return counts * num_microbatches / counts.sum()


def _predicts_next(model: nn.Module) -> bool:
    """Whether the loss compares logits with the labels of the next position."""
    loss = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and not model.config.is_encoder_decoder


def _traced(model: nn.Module, batch: Batch, rows: int, split: dict[str, SplitPoint]) -> Pipe:
    """Trace and split a model for batches like this; what cannot be traced is refused in the words of torch."""
    example = {name: first_rows(value, rows) for name, value in batch.items()}
    try:
        with torch.no_grad():
            return pipeline(model, (), example, split_spec=dict(split))
    except RuntimeError as error:
        if "cannot capture your model" not in str(error):
            raise
        raise RefusedError(f"{str(error).partition('.')[0]}: {error.__cause__}") from error
    finally:
        for name in split:  # a second annotation of the same layer would call itself
            vars(model.get_submodule(name)).pop("forward", None)


def _share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give a stage the parameters of another one of the same names."""
    for name, param in source.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, param)


class _OnlyLoss(nn.Module):
    """A class of transformers returns an object that is no output of a stage; the loss is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        """Return the loss, [1], since outputs of micro-batches are concatenated.

        Later stages get no inputs of the model, so entries become values of the first one.
        """
        return self.model(**{name: tree_map_only(Tensor, torch.clone, each) for name, each in batch.items()}).loss[None]


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
