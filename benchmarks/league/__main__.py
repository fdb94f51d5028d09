"""The league of correctness.

    python -m benchmarks.league --output docs/results/league.md
        [--systems "ours,transformers tp_plan"] [--layouts tp2,pp2] [--every 10] [--only PATTERN] [--log FILE]
    python -m benchmarks.league --prepare FOLDER      installs the other systems into a folder, for `--path FOLDER`

Each system trains the head classes of transformers that the census trains, unmodified, for two steps of plain SGD on
two or four ranks; losses, first gradients and the plain run are compared as in the census. What is in the log is not
trained again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import astuple
from itertools import groupby, product
from math import prod
from pathlib import Path

from benchmarks.league.environments import IMPORTS, path_of, prepare
from benchmarks.league.notes import SETTINGS
from benchmarks.league.outcome import Outcome
from benchmarks.league.page import page
from benchmarks.league.ranks import Ranks

Known = dict[tuple[str, str, str], Outcome]  # (system, layout, class) -> outcome
NAMES = tuple(SETTINGS)
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}


def main() -> int:
    """Run the league, or prepare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--layouts", default="tp2", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth class alone")
    parser.add_argument("--only", default="", help="regular expression on the class")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a class has hung")
    parser.add_argument("--log", type=Path, default=Path("league.jsonl"), help="what is there is not trained again")
    parser.add_argument("--path", type=Path, help="folder that --prepare has filled")
    parser.add_argument("--prepare", type=Path, help="install the other systems into this folder")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    options = parser.parse_args()
    if options.prepare is not None:
        return prepare(options.prepare)
    for name, known in (("systems", NAMES), ("layouts", LAYOUTS)):
        unknown = [each for each in getattr(options, name).split(",") if each not in known]
        if unknown:
            parser.error(f"--{name} has {unknown[0]!r}; use {', '.join(known)}")
    _run(options)
    return 0


def _run(options: argparse.Namespace) -> None:
    """Train what the log does not have; the page is written of what there is, also if the run is interrupted."""
    classes = [each for each in _classes()[:: options.every] if re.search(options.only, each[1])]
    known = _read(options.log)
    systems = sorted(options.systems.split(","), key=lambda system: str(path_of(system, options.path)))
    try:
        for path, group in groupby(systems, key=lambda system: path_of(system, options.path)):
            _train(options, path, list(group), classes, known)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from the log\n")
    if options.output is not None:
        options.output.write_text(page(known, [name for _, name in classes], options.every), encoding="utf-8")


def _train(
    options: argparse.Namespace, path: Path | None, systems: list[str], classes: list[tuple[str, str]], known: Known
) -> None:
    """Train the classes by systems of one environment, and add the outcomes to those that are known."""
    ranks = Ranks(path, options.timeout, sum((IMPORTS.get(system, ()) for system in systems), ()))
    try:
        for layouts in _of_as_many_ranks(options.layouts.split(",")):
            # The plain training of a class serves all systems and layouts of its ranks.
            for (family, name), layout, system in product(classes, layouts, systems):
                if (key := (system, layout, name)) not in known:
                    known[key] = ranks.judge(system, family, name, *LAYOUTS[layout])
                    _write(options.log, key, known[key])
    finally:
        ranks.close()


def _of_as_many_ranks(layouts: list[str]) -> list[list[str]]:
    ordered = sorted(layouts, key=lambda layout: prod(LAYOUTS[layout]))
    return [list(group) for _, group in groupby(ordered, key=lambda layout: prod(LAYOUTS[layout]))]


def _classes() -> list[tuple[str, str]]:
    """(family, class) of the census."""
    found = subprocess.run(
        [sys.executable, "-m", "zoo_tests.campaigns.census.classes"], check=True, capture_output=True, text=True
    )
    return [tuple(each) for each in json.loads(found.stdout)]


def _read(log: Path) -> Known:
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return {tuple(key): Outcome(*found) for key, found in map(json.loads, lines)}


def _write(log: Path, key: tuple[str, str, str], found: Outcome) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps([key, astuple(found)]) + "\n")
    sys.stdout.write(f"{' · '.join(key)}: {found.kind} {found.why}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
