"""Convergence benchmark: the same fine-tuning run unsharded and under four layouts, as a table and a plot.

    python examples/bert/convergence.py --data-dir DIR --output runs/convergence

Every run starts from the same weights and sees the same global batches of 16 pairs in the same order, without dropout.
In exact arithmetic all loss curves would be equal; the table shows how far each one is from the unsharded one over the
first 100 steps. With `--reproducible` all losses and weights must be equal to the bit; the command ends with code 1 if
one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.arguments import RankParser
from booster.errors import ConfigurationError

from convergence_run import parser as run_parser
from convergence_run import settings_of
from layouts import DEFAULT_LAYOUTS, LAYOUTS, REFERENCE, Layout
from report import plot_losses, prepare_directory, print_table
from tasks import load_pairs

_COMPARED_STEPS = 100
_COLUMNS = ("layout", "ranks", "sharded", "accuracy", "F1", "loss")
_CLOSENESS = f"max rel. loss diff., {_COMPARED_STEPS} steps"
_EQUALITY = ("losses equal to the bit", "sha256 of the weights")
_RUN_SCRIPT = Path(__file__).with_name("convergence_run.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested layouts, compare and report them; return the exit code."""
    options = parse_arguments(arguments)
    try:
        prepare_directory(options.output, "--output")
        load_pairs(options.task, options.data_dir, options.seed)  # rejects bad data before anything runs
        results = {name: result_of(LAYOUTS[name], options) for name in options.layouts}
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"error: a run ended with exit code {error.returncode}; what it said stands above\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; finished runs are kept, --reuse takes them up again\n")
        return 130
    report(results, options.output)
    return 1 if options.reproducible and not all_same_bits(results) else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of a run and the layouts to run."""
    parser = RankParser(description="Compare the loss curves and results of layouts on MRPC.", parents=[run_parser()])
    parser.add_argument(
        "--layouts",
        type=_layout_names,
        default=",".join(DEFAULT_LAYOUTS),
        metavar="A,B",
        help="which to run, separated by commas",
    )
    parser.add_argument("--reuse", action="store_true", help="take finished runs of the same settings from --output")
    return parser.parse_args(arguments)


def _layout_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in LAYOUTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a layout; use {', '.join(LAYOUTS)}")
    return names


def result_of(layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    """Return losses and metrics of one layout, from an earlier run if `--reuse` finds one."""
    path = options.output / f"{layout.name}.json"
    if options.reuse and path.is_file():
        result = json.loads(path.read_text())
        if result["settings"] == settings_of(options):
            return result
    subprocess.run(command(layout, options), check=True, env=_environment(layout))
    return json.loads(path.read_text())


def command(layout: Layout, options: argparse.Namespace) -> list[str]:
    """Return the command of one run: plain Python for the reference, `booster run` for a layout."""
    launcher = ["-m", "booster", "run", "--nproc-per-node", str(layout.num_ranks)]
    given = {**settings_of(options), "layout": layout.name, "data_dir": options.data_dir, "output": options.output}
    flags = []
    for name, value in given.items():
        if value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [sys.executable, *(launcher if layout.is_sharded else []), str(_RUN_SCRIPT), *flags]


def _environment(layout: Layout) -> dict[str, str]:
    """Return the environment of a run: one thread per rank, as ranks share the cores, unless the caller sets it."""
    return {**({"OMP_NUM_THREADS": "1"} if layout.is_sharded else {}), **os.environ}


def report(results: dict[str, dict[str, Any]], output: Path) -> None:
    """Print the table, and write it to `table.md` and the curves to `curves.png`."""
    same_bits = all("weights" in result for result in results.values())
    columns = (*_COLUMNS, *(_EQUALITY if same_bits else (_CLOSENESS,)))
    compare = _equality if same_bits else _closeness
    reference = results.get(REFERENCE)
    rows = [(*_row(LAYOUTS[name], result), *compare(result, reference)) for name, result in results.items()]
    lines = [columns, ("---",) * len(columns), *rows]
    (output / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    plot_losses(output / "curves.png", {name: result["losses"] for name, result in results.items()})
    print_table("convergence", columns, rows)


def _row(layout: Layout, result: dict[str, Any]) -> tuple[str, ...]:
    metrics = [f"{result[name]:.4f}" if name in result else "-" for name in ("accuracy", "f1", "loss")]
    return layout.name, str(layout.num_ranks), "yes" if layout.is_sharded else "no", *metrics


def _closeness(result: dict[str, Any], reference: dict[str, Any] | None) -> tuple[str, ...]:
    if reference is None or result is reference:
        return ("-",)
    return (f"{largest_relative_difference(result['losses'], reference['losses']):.1e}",)


def _equality(result: dict[str, Any], reference: dict[str, Any] | None) -> tuple[str, ...]:
    weights = result["weights"][:12]
    if reference is None or result is reference:
        return "-", weights
    pairs = list(zip(result["losses"], reference["losses"], strict=True))
    return f"{sum(loss == expected for loss, expected in pairs)} of {len(pairs)}", weights


def all_same_bits(results: dict[str, dict[str, Any]]) -> bool:
    """Return whether all runs have the same losses, weights and metrics."""
    first, *others = results.values()
    return all(result == first for result in others)


def largest_relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference over the first 100 steps that both runs have."""
    compared = list(zip(losses, reference, strict=False))[:_COMPARED_STEPS]
    return max(abs(loss - expected) / abs(expected) for loss, expected in compared)


if __name__ == "__main__":
    sys.exit(main())
