"""A change of the layout of a running job, against a checkpoint that is saved and loaded."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.construction_memory import start_peak, status_bytes
from benchmarks.harness import run_ranks, table
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.distributed.process_groups import broadcast_json

_WAYS = ("relayout", "save and load")
_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp4 -> tp4": ({}, {"tp_size": 4}),
    "tp2 pp2 -> tp2 dp2": ({"tp_size": 2, "pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}),
    "dp4 -> pp4": ({}, {"pp_size": 4, "num_microbatches": 4}),
    "stage 3 -> tp4": ({"zero_stage": 3}, {"tp_size": 4}),
}


def measure(way: str, layers: int, pair: tuple[dict[str, Any], dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Change between two layouts there and back; return seconds, and bytes at the first change."""
    booster, objects = _job(layers, pair[0])
    _step(booster, objects)
    seconds, peaks = [], []
    for turn in range(2 * repeats):
        options = pair[(turn + 1) % 2]
        start_peak()
        before = status_bytes("VmRSS")
        dist.barrier()
        start = time.perf_counter()
        booster, objects = _CHANGES[way](booster, objects, layers, options)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        peaks.append([before, status_bytes("VmHWM"), status_bytes("VmRSS")])
        _step(booster, objects)
    return {"seconds": seconds, "fullest": _fullest(peaks[0])}


def _job(layers: int, options: dict[str, Any]) -> tuple[Booster, tuple]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "vocab_size": 8000}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    booster = Booster(plugin=HybridParallelPlugin(**options, seed=3))
    return booster, booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def _step(booster: Booster, objects: tuple) -> None:
    model, optimizer = objects
    ids = torch.randint(8000, (4, 32), generator=torch.Generator().manual_seed(1))
    booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _relayout(booster: Booster, objects: tuple, layers: int, options: dict[str, Any]) -> tuple[Booster, tuple]:
    return booster, booster.relayout(HybridParallelPlugin(**options, seed=3), *objects)


def _save_and_load(booster: Booster, objects: tuple, layers: int, options: dict[str, Any]) -> tuple[Booster, tuple]:
    folder = broadcast_json(tempfile.mkdtemp(prefix="relayout-") if dist.get_rank() == 0 else None)
    booster.save_checkpoint(f"{folder}/state", model=objects[0], optimizer=objects[1])
    booster, objects = _job(layers, options)
    booster.load_checkpoint(f"{folder}/state", model=objects[0], optimizer=objects[1])
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return booster, objects


_CHANGES: dict[str, Callable[..., tuple[Booster, tuple]]] = dict(zip(_WAYS, (_relayout, _save_and_load), strict=True))


def _fullest(found: list[int]) -> list[float]:
    """Return bytes before, at the peak and after, of the rank whose peak exceeds both most."""
    gathered = [torch.zeros(3, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(found))
    return max((each.tolist() for each in gathered), key=lambda each: each[1] - max(each[0], each[2]))


def report(quick: bool) -> str:
    layers, repeats = (4, 1) if quick else (12, 4)
    rows: list[list[object]] = []
    for name, pair in _PAIRS.items():
        found = {way: run_ranks(measure, 4, way, layers, pair, repeats) for way in _WAYS}
        moved, loaded = (found[way] for way in _WAYS)
        ratios = [theirs / ours for ours, theirs in zip(moved["seconds"], loaded["seconds"], strict=True)]
        mebibytes = [round(value / 2**20) for value in moved["fullest"]]
        rows.append([name, statistics.median(moved["seconds"]), statistics.median(ratios), *mebibytes])
    return table(
        "A change of the layout in a running job, against a checkpoint saved and loaded",
        ["layouts", "seconds", "save and load / relayout", "MiB before", "MiB at the peak", "MiB after"],
        rows,
        f"A Llama of {layers} layers of 768 with AdamW, 4 ranks, there and back, medians. Resident memory of the "
        "rank whose peak exceeds both layouts most, in the first change, with Python and torch. Checkpoints are "
        "written to a temporary folder.",
    )
