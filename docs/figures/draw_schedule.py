"""Draw the picture of a schedule in docs/pipelines.md: `python docs/figures/draw_schedule.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

FIGURES = Path(__file__).parent
sys.path.insert(0, str(FIGURES.parents[1]))

from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Kind  # noqa: E402
from plugins.hybrid_parallel.pipeline.timeline import Timeline, simulate  # noqa: E402

COLORS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#eeca3b",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}
RANKS, MICROBATCHES, CHUNKS = 4, 8, 2


def main() -> None:
    tables = [SCHEDULES["zbv"].actions(rank, RANKS, MICROBATCHES, CHUNKS) for rank in range(RANKS)]
    timeline = simulate(tables, lambda action: 1 / CHUNKS)
    draw(timeline, f"zbv, {RANKS} ranks, {MICROBATCHES} micro-batches", FIGURES / "zbv.png")


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Draw one row of bars for each rank; its chunks alternate between full and reduced opacity."""
    figure = Figure(figsize=(14, 1.2 + 0.5 * RANKS), layout="constrained")
    axes = figure.subplots()
    for rank, actions in enumerate(timeline.ranks):
        stages = sorted({timed.action.stage for timed in actions})
        for timed in actions:
            action, length = timed.action, timed.end - timed.begin
            axes.barh(
                rank, length, left=timed.begin, height=0.86, color=COLORS[action.kind], edgecolor="white",
                linewidth=0.6, alpha=1.0 if stages.index(action.stage) % 2 == 0 else 0.6,
            )  # fmt: skip
            axes.text(timed.begin + length / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(RANKS), [f"rank {rank}  (idle {idle:.0%})" for rank, idle in enumerate(timeline.bubbles)])
    axes.set(ylim=(RANKS - 0.5, -0.5), xlim=(0, timeline.length), xlabel="time of a forward pass", title=title)
    kinds = [kind for kind in Kind if any(each.action.kind is kind for rank in timeline.ranks for each in rank)]
    axes.legend(
        handles=[Patch(color=COLORS[kind], label=kind.title) for kind in kinds],
        loc="upper center", bbox_to_anchor=(0.5, -0.14 - 0.3 / RANKS), ncols=4, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
