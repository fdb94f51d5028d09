"""The ordinary loop under a pipeline against `execute_pipeline` with the schedules "gpipe" and "1f1b", pp2.

The loop runs all forward passes of a batch before any backward pass, as GPipe does. "loss" reads `outputs.loss`, which
the last stage has computed; "logits" computes a loss from `outputs.logits`, which are broadcast. Memory is the peak of
what operators create on the fuller rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.live_bytes import LiveBytes
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

MICROBATCHES, ROWS, LENGTH, VOCABULARY = 8, 2, 128, 1024
Step = Callable[[], None]


def measure(repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of each way in each turn, and its peak of memory on the fuller rank, in bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024, vocab_size=VOCABULARY
    )
    whole = LlamaForCausalLM(config)
    ids = torch.randint(VOCABULARY, (MICROBATCHES * ROWS, LENGTH))
    ways = _schedule(whole, "gpipe", ids) | _schedule(whole, "1f1b", ids)
    times = turns(ways, repeats, warm_up=2)
    return times, {name: _peak(step) for name, step in ways.items()}


def _schedule(whole: LlamaForCausalLM, style: str, ids: torch.Tensor) -> dict[str, Step]:
    model = copy.deepcopy(whole)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, pp_style=style, num_microbatches=MICROBATCHES))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batch = {"input_ids": ids, "labels": ids}

    def execute_pipeline() -> None:
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def loss() -> None:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def logits() -> None:
        scores = model(input_ids=ids).logits[:, :-1]
        booster.backward(F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten()), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    found = {f"execute_pipeline, {style}": execute_pipeline}
    return found | ({"loop, loss": loss, "loop, logits": logits} if style == "gpipe" else {})


def _peak(step: Step) -> int:
    with LiveBytes() as alive:
        step()
    peak = torch.tensor(alive.peak)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def report(quick: bool) -> str:
    times, peaks = run_ranks(measure, 2, 3 if quick else 21)
    base = "execute_pipeline, gpipe"
    rows: list[list[object]] = [
        [name, 1 / ratio(times, name, base), peaks[name] / peaks[base]]  # time, not speed
        for name in times
    ]
    return table(
        f"The ordinary loop under a pipeline, relative to GPipe (Llama, pp2, {MICROBATCHES} micro-batches, limit 1.10)",
        ["way", "time of a step", "peak of memory"],
        rows,
        f"Logits of {MICROBATCHES * ROWS} x {LENGTH} tokens and {VOCABULARY} words.",
    )
