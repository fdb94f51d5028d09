"""Drawing of `layouts.svg`: the parts of the model that each of four ranks holds under several layouts.

    python docs/figures/draw_layouts.py [FILE]

One rectangle of blocks is one copy of the model. Layers run upwards and are split into pipeline stages; weights run
from left to right and are sharded over the tensor-parallel ranks; copies side by side are data-parallel replicas.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

ROWS = ("embedding", "layer 0", "layer 1", "layer 2", "layer 3", "head")
NUM_RANKS = 4
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
COPY_WIDTH = 1.0
GAP = 0.18


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; their product is the number of ranks."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1

    @property
    def title(self) -> str:
        sizes = {"tp": self.tp_size, "pp": self.pp_size, "dp": self.dp_size}
        return " · ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)

    def rank(self, stage: int, replica: int, column: int) -> int:
        """Return the global rank at a mesh coordinate; the last axis (tp) varies fastest."""
        return (stage * self.dp_size + replica) * self.tp_size + column

    def stage_of(self, row: int) -> int:
        """Return the stage of a row: layers are split evenly; the first stage has the embedding, the last the head."""
        num_layers = len(ROWS) - 2
        layer = min(max(row - 1, 0), num_layers - 1)
        return layer * self.pp_size // num_layers


LAYOUTS = (
    Layout(tp_size=4),
    Layout(pp_size=4),
    Layout(dp_size=4),
    Layout(tp_size=2, pp_size=2),
    Layout(tp_size=2, dp_size=2),
    Layout(pp_size=2, dp_size=2),
)


def main() -> None:
    """Write the figure to the given file, or next to this script."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("layouts.svg")
    # Keep text as text, and make the output reproducible.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "layouts", "font.family": "sans-serif"})
    figure, panels = pyplot.subplots(2, 3, figsize=(11, 6.2), layout="constrained")
    for panel, layout in zip(panels.flat, LAYOUTS, strict=True):
        draw(panel, layout)
    figure.savefig(target, metadata={"Date": None})


def draw(panel: Axes, layout: Layout) -> None:
    """Draw one panel: all copies of the model under one layout."""
    for replica in range(layout.dp_size):
        left = replica * (COPY_WIDTH + GAP)
        for row in range(len(ROWS)):
            for column in range(layout.tp_size):
                rank = layout.rank(layout.stage_of(row), replica, column)
                draw_block(panel, left + column * COPY_WIDTH / layout.tp_size, row, COPY_WIDTH / layout.tp_size, rank)
        panel.text(left + COPY_WIDTH / 2, -0.5, samples_of(replica, layout.dp_size), ha="center", fontsize=7)
    for row, name in enumerate(ROWS):
        panel.text(-0.04, row + 0.5, name, ha="right", va="center", fontsize=7)
    panel.set_title(layout.title, fontsize=11)
    panel.set_xlim(-0.05, layout.dp_size * (COPY_WIDTH + GAP) - GAP)
    panel.set_ylim(-0.7, len(ROWS))
    panel.axis("off")


def draw_block(panel: Axes, left: float, row: int, width: float, rank: int) -> None:
    """Draw the part of one row's weights that a rank holds."""
    panel.add_patch(Rectangle((left, row), width, 1, facecolor=COLOURS[rank], edgecolor="white", linewidth=1.5))
    panel.text(left + width / 2, row + 0.5, f"rank {rank}", ha="center", va="center", color="white", fontsize=6.5)


def samples_of(replica: int, dp_size: int) -> str:
    """Return a label with the samples of a global batch of 16 that a replica gets."""
    share = 16 // dp_size
    return f"samples {replica * share}-{(replica + 1) * share - 1}"


if __name__ == "__main__":
    main()
