"""Drawing of `layouts*.svg`: the parts of the model that each of four ranks holds under several layouts.

    python docs/figures/draw_layouts.py [FOLDER]

There are four files: for light and dark pages, for wide and narrow screens.

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
COLOURS = ("#33669c", "#b35a00", "#3a7a35", "#8a5586")  # white text can be read on each
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


@dataclass(frozen=True)
class Style:
    """Size and colours of a picture; it has no background of its own.

    Attributes:
        size: width and height in inches.
        columns: panels beside each other.
        ink: of labels.
        paper: of the page, and of the lines between blocks.
    """

    size: tuple[float, float]
    columns: int
    ink: str
    paper: str


STYLES = {
    "layouts.svg": Style((11, 6.2), 3, ink="black", paper="white"),
    "layouts_dark.svg": Style((11, 6.2), 3, ink="#d0d3dc", paper="#1e2129"),
    "layouts_narrow.svg": Style((4.6, 8.4), 2, ink="black", paper="white"),
    "layouts_narrow_dark.svg": Style((4.6, 8.4), 2, ink="#d0d3dc", paper="#1e2129"),
}


def main() -> None:
    """Write the pictures into the given folder, or next to this script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    # Keep text as text, and make the output reproducible.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "layouts", "font.family": "sans-serif"})
    for name, style in STYLES.items():
        rows = len(LAYOUTS) // style.columns
        figure, panels = pyplot.subplots(rows, style.columns, figsize=style.size, layout="constrained")
        for panel, layout in zip(panels.flat, LAYOUTS, strict=True):
            draw(panel, layout, style)
        figure.savefig(folder / name, metadata={"Date": None}, transparent=True)
        pyplot.close(figure)


def draw(panel: Axes, layout: Layout, style: Style) -> None:
    """Draw one panel: all copies of the model under one layout."""
    for replica in range(layout.dp_size):
        left = replica * (COPY_WIDTH + GAP)
        for row in range(len(ROWS)):
            for column in range(layout.tp_size):
                rank = layout.rank(layout.stage_of(row), replica, column)
                width = COPY_WIDTH / layout.tp_size
                draw_block(panel, left + column * width, row, width, rank, style.paper)
        samples = samples_of(replica, layout.dp_size)
        panel.text(left + COPY_WIDTH / 2, -0.5, samples, ha="center", va="center", fontsize=7, color=style.ink)
    for row, name in ((-1.0, "samples"), *enumerate(ROWS)):
        panel.text(-0.04, row + 0.5, name, ha="right", va="center", fontsize=7, color=style.ink)
    panel.set_title(layout.title, fontsize=11, color=style.ink)
    panel.set_xlim(-0.05, layout.dp_size * (COPY_WIDTH + GAP) - GAP)
    panel.set_ylim(-0.8, len(ROWS))
    panel.axis("off")


def draw_block(panel: Axes, left: float, row: int, width: float, rank: int, edge: str) -> None:
    """Draw the part of one row's weights that a rank holds."""
    panel.add_patch(Rectangle((left, row), width, 1, facecolor=COLOURS[rank], edgecolor=edge, linewidth=1.5))
    panel.text(left + width / 2, row + 0.5, f"rank {rank}", ha="center", va="center", color="white", fontsize=6.5)


def samples_of(replica: int, dp_size: int) -> str:
    """Return the samples of a global batch of 16 that a replica gets."""
    share = 16 // dp_size
    return f"{replica * share}-{(replica + 1) * share - 1}"


if __name__ == "__main__":
    main()
