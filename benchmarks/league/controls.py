"""This package, and the two controls: what is right, and what is wrong."""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.league.outcome import refusals
from benchmarks.league.system import LEARNING_RATE, System, Trained, is_cut, to_array
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.verify.propose import trace_from_json, trace_to_json
from plugins.hybrid_parallel.verify.train import RecordedStep, Trace, VerifyCase, train_on_rank, train_reference
from shardformer.distributed.process_groups import all_gather_json


class Plain(System):
    """Plain transformers, a control: every class must be exact."""

    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Train without any parallelism."""
        return Trained([train_reference(case)], is_cut=True, seconds=plain_seconds(case))


class Ours(System):
    """This package."""

    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Train with as many micro-batches as stages; one where a batch norm takes its statistics of them."""
        whole = case.tiny_model.build()
        has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in whole.modules())
        options = {"tp_size": tp_size, "pp_size": pp_size, "num_microbatches": 1 if has_batch_norm else pp_size}
        if is_logged:
            trace = train_on_rank(VerifyCase(case.tiny_model, case.rows, case.steps, options))
            return Trained(_of_all_ranks(trace), is_cut=True, seconds=0.0)
        with refusals():
            plugin = HybridParallelPlugin(**options)
            booster = Booster(plugin=plugin)
            batches = [case.tiny_model.batch(whole, step, case.rows) for step in range(case.steps)]
            shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
            model, optimizer = booster.boost(whole, torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE))
        trace, seconds = Trace(plugin.stage_index, plugin.dp_rank, plugin.tp_rank), 0.0
        for batch in batches:
            start = time.perf_counter()
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
            seconds = time.perf_counter() - start
            gradients = {name: to_array(each) for name, each in optimizer.full_gradients().items()}
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - start
            trace.steps.append(RecordedStep(loss.item(), [], gradients, {}))
        has_less = len(list(model.parameters())) < len(shapes) or is_cut(shapes, model.named_parameters())
        return Trained(_of_all_ranks(trace), any(all_gather_json(has_less)), seconds)


class Faulty(Ours):
    """This package with a gradient that is one percent too large, a control: every class must be wrong."""

    is_explained = False

    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Train, and spoil the largest gradient of each rank."""
        found = super().train(case, tp_size, pp_size)
        for trace in found.traces:
            gradients = trace.steps[0].gradients
            largest = max(gradients, key=lambda name: float(abs(gradients[name]).max(initial=0.0)), default=None)
            if largest is not None:
                gradients[largest] = gradients[largest] * 1.01
        return found


def plain_seconds(case: VerifyCase) -> float:
    """Return the duration of the last step of plain training."""
    model, seconds = case.tiny_model.build(), 0.0
    batches = [case.tiny_model.batch(model, step, case.rows) for step in range(case.steps)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    for batch in batches:
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
    return seconds


def _of_all_ranks(trace: Trace) -> list[Trace]:
    return [trace_from_json(each) for each in all_gather_json(trace_to_json(trace))]
