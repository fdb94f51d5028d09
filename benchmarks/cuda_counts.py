"""Counts what a step asks of a GPU: kernels, copies, host synchronizations, collectives; nothing runs on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.harness import table

# Layout -> options, number of ranks, and the rank whose step is counted.
_LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "one GPU": ({}, 1, 0),
    "dp2, ZeRO-1": ({"dp_size": 2}, 2, 0),
    "tp2": ({"tp_size": 2}, 2, 0),
    "tp2, sequence parallel": ({"tp_size": 2, "enable_sequence_parallelism": True}, 2, 0),
    "pp2, last stage": ({"pp_size": 2}, 2, 1),
    "cp2, ring": ({"cp_size": 2}, 2, 0),
    "tp2, fp8": ({"tp_size": 2, "precision": "fp8"}, 2, 0),
    "ep2 (Mixtral)": ({"ep_size": 2}, 2, 0),
}
_MICROBATCHES = 2
_LAYERS = 2
_SIZES = {"hidden_size": 64, "intermediate_size": 128}  # such that 8-bit products fit
_COLUMNS = ["layout", "kernels", "copies", "waits of our code", "waits of transformers", "collectives", "KiB sent"]
_NOTE = (
    f"A Llama of {_LAYERS} layers (Mixtral for ep2), bf16, {_MICROBATCHES} micro-batches with a mask: one whole step "
    "of `execute_pipeline`, AdamW and `zero_grad`, traced on fake CUDA tensors. No GPU has run this. Kernels are "
    "operators that run on the device; a foreach operator counts as one. Copies are those of the batch to the device. "
    "Our code waits for the device once a step, to decide whether gradients are finite; with experts also once in "
    "each layer and micro-batch, for the number of rows to and from each rank. transformers waits once for each mask "
    "that a micro-batch has, and not without a mask. DistributedDataParallel and FSDP2 have not "
    "been counted in this way."
)


def report(quick: bool) -> str:
    layouts = dict(list(_LAYOUTS.items())[:2]) if quick else _LAYOUTS
    asked = [_trace(name, *layout) for name, layout in layouts.items()]
    done = subprocess.run(
        [sys.executable, "-m", "zoo_tests.cuda_trace"],
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    rows = [_row(name, counts) for name, counts in zip(layouts, answers, strict=True)]
    return table("What a step asks of a GPU, counted on fake tensors", _COLUMNS, rows, _NOTE)


def _trace(name: str, options: dict[str, Any], world_size: int, rank: int) -> dict[str, Any]:
    return {
        "family": "mixtral" if "Mixtral" in name else "llama",
        "options": {"precision": "bf16", "num_microbatches": _MICROBATCHES, **options},
        "world_size": world_size,
        "rank": rank,
        "config": {"num_hidden_layers": _LAYERS, **_SIZES},
    }


def _row(name: str, counts: dict[str, Any]) -> list[Any]:
    if "error" in counts:
        raise RuntimeError(f"{name}: {counts['error']}")
    theirs = sum(count for place, count in counts["syncs"].items() if "@ transformers/" in place)
    ours = sum(counts["syncs"].values()) - theirs
    copies, collectives = sum(counts["copies"].values()), sum(counts["collectives"].values())
    return [
        name,
        sum(counts["kernels"].values()),
        copies,
        ours,
        theirs,
        collectives,
        round(counts["collective_bytes"] / 1024),
    ]
