"""Draw the schedules, the memory of layouts, and measured speeds of docs/pictures.md.

    python docs/figures/draw_pictures.py [schedules] [memory] [speed]

Schedules are simulated, memory is what `booster plan` predicts, and speeds are read from docs/results/performance.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

FIGURES = Path(__file__).parent
REPOSITORY = FIGURES.parents[1]
sys.path.insert(0, str(REPOSITORY))

from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Kind  # noqa: E402
from plugins.hybrid_parallel.pipeline.timeline import Timeline, simulate  # noqa: E402
from zoo_tests.docs.pages import rows_of  # noqa: E402

COLORS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#eeca3b",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}
HALVES = {Kind.BACKWARD: 2}  # each half of a backward pass takes as long as a forward pass
RANKS, MICROBATCHES = 4, 8
CHUNKS = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
PARTS = {"parameters": "#4c78a8", "gradients": "#f58518", "optimizer": "#54a24b", "activations": "#b279a2"}
MEMORY = {
    "8 replicas, ZeRO-0": "dp8 tp1 pp1 micro 2x1 zero0",
    "8 replicas, ZeRO-1": "dp8 tp1 pp1 micro 2x1 zero1",
    "8 replicas, ZeRO-2": "dp8 tp1 pp1 micro 2x1 zero2",
    "8 replicas, ZeRO-3": "dp8 tp1 pp1 micro 2x1 zero3",
    "tp8": "dp1 tp8 pp1 micro 4x4 zero1",
    "tp2 · pp4": "dp1 tp2 pp4 1f1b micro 16x1 zero1",
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def draw_schedules() -> Figure:
    """One row of axes for each schedule, one row of bars for each rank."""
    figure = Figure(figsize=(11, 2.1 * len(SCHEDULES)), layout="constrained")
    drawn = {}
    for name in SCHEDULES:
        chunks = CHUNKS.get(name, 1)
        tables = [SCHEDULES[name].actions(rank, RANKS, MICROBATCHES, chunks) for rank in range(RANKS)]
        drawn[name] = simulate(tables, lambda action, chunks=chunks: HALVES.get(action.kind, 1) / chunks)
    longest = max(timeline.length for timeline in drawn.values())
    for axes, (name, timeline) in zip(figure.subplots(len(drawn), sharex=True), drawn.items(), strict=True):
        _draw_ranks(axes, timeline)
        idle = sum(timeline.bubbles) / RANKS
        axes.set_title(f"{name}: {idle:.0%} idle", loc="left", fontsize=11)
        axes.set_xlim(0, longest)
    axes.set_xlabel("time, in forward passes of a rank")
    handles = [Patch(color=COLORS[kind], label=kind.title) for kind in COLORS]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_ranks(axes: Axes, timeline: Timeline) -> None:
    """Chunks of a rank alternate between full and reduced opacity; each bar has the number of its micro-batch."""
    for rank, actions in enumerate(timeline.ranks):
        stages = sorted({timed.action.stage for timed in actions})
        for timed in actions:
            action, length = timed.action, timed.end - timed.begin
            axes.barh(
                rank, length, left=timed.begin, height=0.86, color=COLORS[action.kind], edgecolor="white",
                linewidth=0.5, alpha=1.0 if stages.index(action.stage) % 2 == 0 else 0.6,
            )  # fmt: skip
            axes.text(timed.begin + length / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=6)
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    axes.set_ylim(RANKS - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw_memory() -> Figure:
    """Stacked bars: what the fullest of 8 ranks holds of a Llama 8B."""
    with tempfile.TemporaryDirectory() as folder:
        config, table = Path(folder, "config.json"), Path(folder, "table.json")
        config.write_text(json.dumps(LLAMA_8B))
        command = ["-m", "booster", "plan", str(config), "--devices", "8", "--device", "H100", "--memory", "900GiB"]
        command += ["--global-batch", "16", "--sequence-length", "2048", "--table", str(table)]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
        found = {row["layout"]: row["memory_bytes"] for row in json.loads(table.read_text())["layouts"]}
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for position, layout in enumerate(MEMORY.values()):
        begin = 0.0
        for part, color in PARTS.items():
            size = found[layout][part] / 2**30
            axes.barh(position, size, left=begin, color=color, height=0.7)
            begin += size
        axes.text(begin + 1, position, f"{begin:.0f}", va="center")
    axes.set_yticks(range(len(MEMORY)), MEMORY, fontsize=10)
    axes.invert_yaxis()
    axes.axvline(80, color="grey", linewidth=1, linestyle="--")
    axes.set_xlabel("GiB on the fullest rank; the line is 80")
    axes.legend(handles=[Patch(color=color, label=part) for part, color in PARTS.items()], frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_speed() -> Figure:
    """Bars of tensor parallelism and of a ZeRO-1 step, beside other systems, as the results say."""
    page = REPOSITORY / "docs" / "results" / "performance.md"
    tensor_parallel = rows_of(page, "N_CTX")
    steps = [row for row in rows_of(page, "dp") if row[0] == "4" and len(row) == 4][1:5]  # without our own
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for offset, (column, label, color) in enumerate(((1, "ours", "#4c78a8"), (4, "DTensor", "#bab0ac"))):
        places = [position + 0.38 * offset for position in range(len(tensor_parallel))]
        left.bar(places, [float(row[column]) for row in tensor_parallel], width=0.36, color=color, label=label)
    left.set_xticks([position + 0.19 for position in range(len(tensor_parallel))], [row[0] for row in tensor_parallel])
    left.axhline(2, color="grey", linewidth=1, linestyle="--")
    left.set(title="tp2, times one rank", xlabel="tokens of a sample")
    left.legend(frameon=False, ncols=2, loc="upper left")
    left.set_ylim(0, 2.5)
    right.barh([row[1] for row in steps], [float(row[3]) for row in steps], color="#4c78a8")
    right.invert_yaxis()
    right.axvline(1, color="grey", linewidth=1, linestyle="--")
    right.set(title="ZeRO-1 step of BERT-base, dp4", xlabel="time of others / ours")
    right.tick_params(axis="y", labelsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES = {"schedules": draw_schedules, "memory": draw_memory, "speed": draw_speed}


def main(names: list[str]) -> None:
    for name in names or PICTURES:
        PICTURES[name]().savefig(FIGURES / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
