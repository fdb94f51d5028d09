"""Runs all scripts under all layouts: `python -m zoo_tests.scripts --output docs/results/scripts.md`."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from zoo_tests.harness.ranks import stop_pools
from zoo_tests.scripts.outcome import Outcome, compare, head_of_table, put_into
from zoo_tests.scripts.port import LAYOUTS, NAMES, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=NAMES, help="names of scripts")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    outcomes = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as directory:
            for layout, outcome in compare(name, Path(directory)).items():
                outcomes[name, layout] = outcome
                print(f"{name:24} {layout:4} {outcome.kind:8} {outcome.detail[:2000]}", flush=True)
    stop_pools()
    counts = Counter(outcome.kind for outcome in outcomes.values())
    print(", ".join(f"{kind}: {count}" for kind, count in counts.items()))
    if options.output is not None:
        put_into(options.output, "scripts", page(outcomes, options.only))


def page(outcomes: dict[tuple[str, str], Outcome], names: list[str]) -> str:
    """The table, and the sentence of each refusal."""
    lines = head_of_table([outcome.kind for outcome in outcomes.values()], ["Script", "What it does", *LAYOUTS])
    for name in names:
        cells = " | ".join(outcomes[name, layout].kind for layout in LAYOUTS)
        lines.append(f"| {name} | {plain(name).splitlines()[0].strip(chr(34))} | {cells} |")
    lines += ["", "Refusals:", ""]
    sentences = {outcome.detail.split(": ", 1)[-1] for outcome in outcomes.values() if outcome.kind == "refused"}
    return "\n".join([*lines, *(f"- {sentence}" for sentence in sorted(sentences))]) + "\n"


if __name__ == "__main__":
    main()
