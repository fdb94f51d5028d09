"""Pipeline schedules in isolation: 4 stages, 4 micro-batches, layers that wait instead of computing.

A rank's share of a micro-batch waits F forward and 2 F backward, one half each for the gradients of inputs and of
weights. The benchmark times `execute_pipeline` on 4 ranks, including its communication, and compares it with the
prediction of `simulate`. CPU only: a wait needs no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.harness import ratio, run_ranks, table, turns
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind
from plugins.hybrid_parallel.pipeline.timeline import simulate
from shardformer.matmul.kernel import WeightGradStore

RANKS, MICROBATCHES, LAYERS = 4, 4, 8


class Wait(torch.autograd.Function):
    """Wait `seconds` forward and twice that backward; the half for the weight gradient may be deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float, store: WeightGradStore | None) -> Tensor:
        ctx.weight, ctx.seconds, ctx.store = weight, seconds, store
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        weight, seconds = ctx.weight, ctx.seconds

        def grad_weight() -> Tensor:
            time.sleep(seconds)
            return torch.zeros_like(weight)

        time.sleep(seconds)
        if ctx.store is None or ctx.store.deferred is None:
            return grad, grad_weight(), None, None
        ctx.store.deferred.append((weight, grad_weight))
        return grad, None, None, None


def measure(seconds: float, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each schedule in each turn."""
    steps = {name: _step(name, seconds) for name in SCHEDULES}
    return turns(steps, repeats, warm_up=2)


def predicted(name: str) -> float:
    """Return the time of a step without communication, in units of F."""
    schedule = SCHEDULES[name]
    chunks = _chunks(name)
    tables = [schedule.actions(rank, RANKS, MICROBATCHES, chunks) for rank in range(RANKS)]

    def duration(action: Action) -> float:
        return (2.0 if action.kind is Kind.BACKWARD else 1.0) / chunks

    return simulate(tables, duration).length


def report(quick: bool) -> str:
    seconds, repeats = (0.02, 3) if quick else (0.1, 9)
    times = run_ranks(measure, RANKS, seconds, repeats)
    lengths = {name: predicted(name) for name in SCHEDULES}
    rows: list[list[object]] = []
    for name in SCHEDULES:
        expected, found = lengths["1f1b"] / lengths[name], ratio(times, name, "1f1b")
        rows.append([name, _chunks(name), expected, found, f"{(found / expected - 1) * 100:+.1f} %"])
    return table(
        f"Pipeline schedules: speed relative to 1F1B ({RANKS} ranks, {MICROBATCHES} micro-batches, layers that wait)",
        ["schedule", "stages per rank", "predicted", "measured", "difference"],
        rows,
        "CPU only.",
    )


def _chunks(name: str) -> int:
    return SCHEDULES[name].chunks or 2


def _step(name: str, seconds: float) -> Callable[[], None]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    whole = LlamaForSequenceClassification(LlamaConfig(num_hidden_layers=LAYERS, num_labels=2, pad_token_id=0, **sizes))
    chunks = {"num_model_chunks": 2} if SCHEDULES[name].chunks is None else {}
    plugin = HybridParallelPlugin(pp_size=RANKS, pp_style=name, num_microbatches=MICROBATCHES, **chunks)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    for layer in model.unwrap().modules():
        if isinstance(layer, LlamaDecoderLayer):
            _let_wait(layer, seconds * RANKS / LAYERS, model.runtime.weight_grad_store)
    batch = {
        "input_ids": torch.randint(1, 32, (MICROBATCHES, 4)),
        "labels": torch.randint(0, 2, (MICROBATCHES,)),
    }

    def step() -> None:
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer, return_loss=False)
        optimizer.zero_grad()

    return step


def _let_wait(layer: nn.Module, seconds: float, store: WeightGradStore | None) -> None:
    forward, weight = layer.forward, next(layer.parameters())

    def waiting(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(Wait.apply(hidden, weight, seconds, store), *args, **kwargs)

    layer.forward = waiting
