"""Counts what a step asks of a GPU: kernels, copies, host synchronizations, collectives; nothing runs on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.harness import table

# Row -> system, options, number of ranks, and the rank whose step is counted.
_ROWS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "one GPU": ("ours", {}, 1, 0),
    "dp2, ZeRO-1": ("ours", {"dp_size": 2}, 2, 0),
    "dp2, DDP": ("DDP", {}, 2, 0),
    "dp2, FSDP2, reshard_after_forward=False": ("FSDP2", {}, 2, 0),
    "dp2, DeepSpeed ZeRO-1": ("DeepSpeed", {}, 2, 0),
    "tp2": ("ours", {"tp_size": 2}, 2, 0),
    "tp2, sequence parallel": ("ours", {"tp_size": 2, "enable_sequence_parallelism": True}, 2, 0),
    "pp2, last stage": ("ours", {"pp_size": 2}, 2, 1),
    "cp2, ring": ("ours", {"cp_size": 2}, 2, 0),
    "tp2, fp8": ("ours", {"tp_size": 2, "precision": "fp8"}, 2, 0),
    "tp2, sequence parallel, fp8": (
        "ours",
        {"tp_size": 2, "enable_sequence_parallelism": True, "precision": "fp8"},
        2,
        0,
    ),
    "ep2 (Mixtral)": ("ours", {"ep_size": 2}, 2, 0),
    "ep2 (Mixtral), 1.5 times the rows": ("ours", {"ep_size": 2, "expert_rank_capacity_factor": 1.5}, 2, 0),
}
_MICROBATCHES = 2
_LAYERS = 2
_SIZES = {"hidden_size": 64, "intermediate_size": 128}  # such that 8-bit products fit
_COLUMNS = [
    "layout",
    "kernels",
    "copies to the device",
    "waits, without those of transformers",
    "waits of transformers",
    "collectives",
    "KiB sent",
]
_NOTE = (
    f"A Llama of {_LAYERS} layers (Mixtral for ep2), bf16 with fp32 weights, {_MICROBATCHES} micro-batches with a "
    "mask: one whole step with AdamW (ours fused, others foreach) and `zero_grad`, traced on fake CUDA tensors. "
    "Kernels are operators that run on the device; a foreach operator counts as one, and so does a fused kernel. "
    "Collectives count messages between stages too; the bytes are those of the larger of input and result. Our "
    "code waits for the device once a step, to decide whether gradients are finite; with experts also once in "
    "each layer and micro-batch: tokens are neither dropped nor padded, so that the host must know how many rows "
    "come from each rank; not with `expert_rank_capacity_factor`. Traces have no "
    "values, so that an exchange of exact rows is one row for each rank. "
    "transformers waits once for each mask of a micro-batch, to know whether it hides "
    "anything, and not without a mask. Of the other systems, only DeepSpeed looks for overflow and computes a "
    "norm, as we do. DDP runs under autocast and broadcasts the model's buffers in each pass; its communication "
    "hook is ours, since a fake process group has no futures, and does the same all-reduce. FSDP2 has a "
    "`MixedPrecisionPolicy` of bf16 with fp32 reductions. DeepSpeed has `overlap_comm`; "
    "traces have no values, so that its checks of overflow and norm are told that all is finite; its row needs `pip "
    "install deepspeed`. Written by `python -m benchmarks --only cuda_counts`."
)


def report(quick: bool) -> str:
    wanted = dict(list(_ROWS.items())[:2]) if quick else _ROWS
    asked = [_trace(name, *row) for name, row in wanted.items()]
    done = subprocess.run(
        [sys.executable, "-m", "zoo_tests.cuda_trace"],
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    # DeepSpeed writes to the standard output, too.
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    rows = [_row(name, counts) for name, counts in zip(wanted, answers, strict=True)]
    step = table("What a step asks of a GPU, counted on fake tensors", _COLUMNS, rows, _NOTE)
    return f"{step}\n{_batch_invariant()}"


# ----- log-probabilities of trainer and sampler -----

_BATCH_INVARIANT = (
    f"A Llama of {_LAYERS} layers in bf16, 4 rows of 64 tokens; operators that run on the device, counted on CPU "
    "tensors. Under `reproducible=True` a shape is tried once: where one call has the bits of its tiles of 32 rows or "
    "keys, it is one call from then on. Written by `python -m benchmarks --only cuda_counts`."
)


def _batch_invariant() -> str:
    command = "from zoo_tests.cuda_trace import scores; scores.main()"
    ways = json.loads(
        subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    )
    rows = [[name, *(way[name] for way in ways)] for name in ways[0]]
    columns = ["log-probabilities", "without", "with, shapes in one call", "with, tile by tile"]
    return table(
        "Kernels of trainer and sampler that agree, without and with `reproducible=True`",
        columns,
        rows,
        _BATCH_INVARIANT,
    )


def _trace(name: str, system: str, options: dict[str, Any], world_size: int, rank: int) -> dict[str, Any]:
    return {
        "family": "mixtral" if "Mixtral" in name else "llama",
        "system": system,
        "options": {"precision": "bf16", "num_microbatches": _MICROBATCHES, **options},
        "world_size": world_size,
        "rank": rank,
        "config": {"num_hidden_layers": _LAYERS, **_SIZES},
    }


def _row(name: str, counts: dict[str, Any]) -> list[Any]:
    if "No module named 'deepspeed'" in counts.get("error", ""):
        return [name, *["not installed"] * (len(_COLUMNS) - 1)]
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
