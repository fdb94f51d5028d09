"""Step time that `booster plan` predicts for this machine against the measured one, on two ranks."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.harness import run_ranks
from plugins.hybrid_parallel.planner.calibrate import Case, calibrate
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.stage_map import ModelMap

_LENGTH, _BATCH, _ROWS = 192, 8, (1, 8)
_LAYOUTS = (
    Layout(2, 1, 1, rows=4, precision="fp32"),
    Layout(2, 1, 1, rows=1, num_microbatches=4, precision="fp32"),
    Layout(1, 2, 1, rows=8, precision="fp32"),
    Layout(1, 2, 1, sequence=True, rows=4, num_microbatches=2, precision="fp32"),
    Layout(1, 1, 2, rows=2, num_microbatches=4, precision="fp32"),
    Layout(1, 1, 2, rows=2, num_microbatches=4, pp_style="gpipe", precision="fp32"),
    Layout(1, 1, 2, rows=2, num_microbatches=4, pp_style="interleaved", num_chunks=2, precision="fp32"),
    Layout(1, 1, 2, rows=2, num_microbatches=4, pp_style="zero_bubble", precision="fp32"),
    Layout(1, 1, 2, rows=1, num_microbatches=8, pp_style="zbv", num_chunks=2, precision="fp32"),
    Layout(1, 1, 2, rows=4, num_microbatches=2, recomputation="full", precision="fp32"),
)


def report(quick: bool) -> str:
    """Return the section of the results page."""
    build = partial(_build, 2 if quick else 8)
    cases = [Case(tp, sequence, rows) for tp, sequence in ((1, False), (2, False), (2, True)) for rows in _ROWS]
    rounds = 1 if quick else 3
    predicted: dict[Layout, list[float]] = {layout: [] for layout in _layouts(quick)}
    measured: dict[Layout, list[float]] = {layout: [] for layout in _layouts(quick)}
    model = ModelMap(build)
    for _ in range(rounds):  # alternate, so that a drift of the machine affects both
        calibration = calibrate(build, 2, _LENGTH, "fp32", cases)
        profiler = Profiler(build, _LENGTH, calibration.device, "fp32", _ROWS, calibration.parts)
        for layout in measured:
            predicted[layout].append(Predictor(model, profiler).predict(layout).seconds.total)
            measured[layout].append(run_ranks(_measure, 2, build, layout.options(), 3 if quick else 6))
    return _table(predicted, measured, rounds)


def _layouts(quick: bool) -> list[Layout]:
    return [layout for layout in _LAYOUTS if not quick or layout.num_stages <= 2]


def _table(predicted: dict[Layout, list[float]], measured: dict[Layout, list[float]], rounds: int) -> str:
    rows = []
    times = {layout: statistics.median(values) for layout, values in measured.items()}
    guesses = {layout: statistics.median(values) for layout, values in predicted.items()}
    for layout in times:
        ratios = [guess / real for guess, real in zip(predicted[layout], measured[layout], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        order = [sorted(each, key=each.__getitem__).index(layout) + 1 for each in (guesses, times)]
        rows.append(f"| {layout} | {guesses[layout] / times[layout]:.2f} | {spread} | {order[0]} | {order[1]} |")
    best = min(guesses, key=guesses.__getitem__)
    place = sorted(times, key=times.__getitem__).index(best) + 1
    return "\n".join(
        [
            "## Predicted time of a step over the measured one",
            "",
            f"Llama, 8 layers, hidden 384, {_BATCH} samples of {_LENGTH} tokens, fp32, two ranks of one thread. "
            f"Medians of {rounds} rounds, each of which calibrates, predicts and trains.",
            "",
            "| Layout | Predicted / measured | In single rounds | Place predicted | Place measured |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"The layout that was predicted to be the fastest is number {place} of those measured.",
            "",
        ]
    )


def _build(layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=2000, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _measure(build: partial, options: dict, steps: int) -> float:
    """Return the median seconds of a step on the slowest rank."""
    from booster import Booster
    from plugins.hybrid_parallel import HybridParallelPlugin

    torch.manual_seed(0)
    model = build()
    plugin = HybridParallelPlugin(**options)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))
    times = []
    for _ in range(2 + steps):
        ids = torch.randint(2000, (_BATCH // plugin.dp_size, _LENGTH))
        dist.barrier()
        began = time.perf_counter()
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])
