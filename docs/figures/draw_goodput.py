"""Draw the picture of docs/planner.md on failures: `python docs/figures/draw_goodput.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

FIGURES = Path(__file__).parent
sys.path.insert(0, str(FIGURES.parents[1]))

from benchmarks.goodput import by_devices  # noqa: E402

DEVICES = [2**power for power in range(10, 18)]


def main() -> None:
    curves: dict[str, list[float]] = {}
    for devices in DEVICES:
        for name, each in by_devices(devices).items():
            curves.setdefault(name, []).append(100 * each.useful)
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    for name, values in curves.items():
        axes.plot(DEVICES, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEVICES, [f"{devices:,}" for devices in DEVICES])
    axes.set_xlabel("H100, a failure of one in 50,676 h in the mean")
    axes.set_ylabel("goodput, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURES / "goodput.png", dpi=120)


if __name__ == "__main__":
    main()
