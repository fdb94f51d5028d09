"""The page of the league."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import transformers

from benchmarks.league.outcome import CRASHED, EXACT, HUNG, NOT_PLAIN, OUTCOMES, UNCUT, WRONG, Outcome

Known = Mapping[tuple[str, str, str], Outcome]  # (system, layout, class) -> outcome


def page(known: Known, classes: Sequence[str], every: int) -> str:
    """Return the page as Markdown.

    Args:
        known: all outcomes.
        classes: the classes that were trained.
        every: every how many-th class of the census these are.
    """
    part = "" if every == 1 else f", every {every}th of the census"
    lines = [
        "# A league of correctness",
        "",
        "Written by `python -m benchmarks.league --output docs/results/league.md"
        + ("" if every == 1 else f" --every {every}")
        + "`; do not edit.",
        "",
        f"{len(classes)} head classes of transformers {transformers.__version__}{part}, unmodified, on ranks of",
        f"torch {torch.__version__} on CPUs. Each system trains a tiny model of the class for two steps of plain SGD,",
        "with the settings that its documentation gives for training. Losses and first gradients are compared with",
        "plain transformers at the tolerance of the census (1e-3, fp32).",
        "",
        f"`{UNCUT}`: the numbers are right, and every rank had the whole model. `refused`: the system says that it",
        "does not take the class or the layout. Two controls: plain transformers must be exact wherever a class trains",
        "plainly, ours with a fault nowhere.",
        "",
        f"| System | Layout | {' | '.join(OUTCOMES)} | step / plain |",
        f"|{'---|' * (len(OUTCOMES) + 3)}",
    ]
    runs = sorted({(layout, system) for system, layout, _ in known}, key=lambda run: (run[0], _order(known, run[1])))
    for layout, system in runs:
        found = {name: known[system, layout, name] for name in classes if (system, layout, name) in known}
        counts = Counter(each.kind for each in found.values())
        numbers = " | ".join(str(counts[kind]) for kind in OUTCOMES)
        lines.append(f"| {system} | {layout} | {numbers} | {_cost(known, found, layout)} |")
    lines += [
        "",
        "## What is wrong, crashed or hung",
        "",
        "| System | Layout | Class | | Why |",
        "|---|---|---|---|---|",
    ]
    for layout, system in runs:
        for name in classes:
            each = known.get((system, layout, name))
            if each is not None and each.kind in (WRONG, CRASHED, HUNG) and "fault" not in system:
                why = each.why.replace("[", r"\[")
                lines.append(f"| {system} | {layout} | `{name}` | {each.kind} | {why} |")
    return "\n".join(lines) + "\n"


def _order(known: Known, system: str) -> int:
    return list(dict.fromkeys(name for name, _, _ in known)).index(system)


def _cost(known: Known, found: Mapping[str, Outcome], layout: str) -> str:
    """Return the median time of a step over that of plain training, for the classes that are exact."""
    ratios = [
        each.seconds / plain.seconds
        for name, each in found.items()
        if each.kind == EXACT
        and (plain := known.get(("plain transformers", layout, name))) is not None
        and plain.kind != NOT_PLAIN
        and plain.seconds
    ]
    return f"{statistics.median(ratios):.2f}" if ratios else ""
