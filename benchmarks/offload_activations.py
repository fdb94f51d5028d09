"""Peak memory and time of a step of BERT-base with `offload_activations`, against without and against recomputation.

One rank trains in fp32 without dropout, so that the three ways compute the same numbers. A dispatch mode counts all
storages that are alive in a step; weights, gradients and optimizer states are not among them. Times are taken in turns
without it. Activations go to a file in the directory for temporary files.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.live_bytes import LiveBytes
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

OFFLOAD, RECOMPUTE, BOTH, PLAIN = "offload_activations", "gradient_checkpointing='full'", "both", "neither"


def _ways(directory: str) -> dict[str, dict[str, Any]]:
    offload, recompute = {"offload_activations": directory}, {"gradient_checkpointing": "full"}
    return {PLAIN: {}, OFFLOAD: offload, RECOMPUTE: recompute, BOTH: offload | recompute}


def measure(layers: int, rows: int, length: int, repeats: int) -> dict[str, tuple[int, float, float]]:
    """Return way -> (peak in bytes, its seconds / those of a step without, median seconds)."""
    with tempfile.TemporaryDirectory() as directory:
        steps = {name: _step(options, layers, rows, length) for name, options in _ways(directory).items()}
        peaks = {}
        for name, step in steps.items():
            step()  # buffers of gradients, and the order of layers
            with LiveBytes() as alive:
                step()
            peaks[name] = alive.peak
        times = turns(steps, repeats)
    return {name: (peaks[name], ratio(times, PLAIN, name), statistics.median(times[name])) for name in steps}


def _step(options: dict[str, Any], layers: int, rows: int, length: int) -> Callable[[], None]:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, vocab_size=1024
    )
    model = BertForSequenceClassification(config).train()
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batch = {"input_ids": torch.randint(1, 1024, (rows, length)), "labels": torch.zeros(rows, dtype=torch.long)}

    def step() -> None:
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def report(quick: bool) -> str:
    layers, rows, length, repeats = (4, 2, 128, 3) if quick else (12, 4, 512, 5)
    found = run_ranks(measure, 1, layers, rows, length, repeats)
    most = found[PLAIN][0]
    lines = [[name, round(peak / 2**20, 1), peak / most, slower] for name, (peak, slower, _) in found.items()]
    return table(
        f"Activations in a file: {layers} layers of BERT-base, batch {rows}, sequence {length}",
        ["option", "peak MiB of a step", "peak / without", "time / without"],
        lines,
        f"A step without takes {found[PLAIN][2]:.2f} s.",
    )
