"""The page of the league."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import transformers

from benchmarks.league.notes import SETTINGS, note_on
from benchmarks.league.outcome import CRASHED, EXACT, HUNG, OUTCOMES, REFUSED, UNCUT, WRONG, Outcome

Known = Mapping[tuple[str, str, str], Outcome]  # (system, layout, class) -> outcome
Run = tuple[str, str]  # layout, system
_LEAST_RATIOS = 5
_MOST_PLACES = 3


def page(known: Known, classes: Sequence[str], every: int) -> str:
    """Return the page as Markdown.

    Args:
        known: all outcomes.
        classes: the classes that were trained.
        every: every how many-th class of the census these are.
    """
    runs = sorted({(layout, system) for system, layout, _ in known}, key=lambda run: (_layout(run[0]), _place(run[1])))
    return "\n".join(
        [*_head(classes, every), *_summary(known, classes, runs), *_settings(runs), *_failures(known, runs)]
    )


def _head(classes: Sequence[str], every: int) -> list[str]:
    part = "" if every == 1 else f", every {every}th of the census"
    return [
        "# A league of correctness",
        "",
        f"Written by `python -m benchmarks.league --every {every} --output docs/results/league.md`; do not edit.",
        "",
        f"{len(classes)} head classes of transformers {transformers.__version__}{part}, unmodified, on ranks of",
        f"torch {torch.__version__} on CPUs. Each system trains a tiny model of the class for two steps of plain SGD",
        "on the same batches, whose samples have different lengths and numbers of labels. Losses and first gradients",
        "are compared with plain transformers at the tolerance of [the census](coverage.md) (1e-3, fp32).",
        "",
        f"- `{WRONG}`: it trains without a message, and the numbers are others.",
        f"- `{UNCUT}`: the numbers are right, and every rank had the whole model.",
        f"- `{REFUSED}`: a message while the model is prepared says that the class or the layout is not supported.",
        f"- `{CRASHED}`: any other error. `{HUNG}`: no answer in time, twice.",
        "- *of*: the classes that were trained so far; where it is small, a row says little. The same command goes on",
        "  from its log.",
        "- *step*: the median time of a step over that of plain training in the same processes, where at least",
        f"  {_LEAST_RATIOS} classes are exact. Tiny models on CPUs show the cost of a call, not that of communication",
        "  in a large model, and a machine that does something else, too, blurs it: compare within a layout.",
        "",
        "Two controls: plain transformers must be exact wherever a class trains plainly, and this package with one",
        "gradient that is 1 % too large must be wrong wherever it is exact otherwise.",
        "",
    ]


def _summary(known: Known, classes: Sequence[str], runs: Sequence[Run]) -> list[str]:
    lines = [f"| System | Layout | of | {' | '.join(OUTCOMES)} | step |", f"|{'---|' * (len(OUTCOMES) + 4)}"]
    for layout, system in runs:
        found = [known[system, layout, name] for name in classes if (system, layout, name) in known]
        counts = Counter(each.kind for each in found)
        numbers = " | ".join(str(counts[kind]) for kind in OUTCOMES)
        lines.append(f"| {system} | {layout} | {len(found)} | {numbers} | {_cost(found)} |")
    return [*lines, ""]


def _settings(runs: Sequence[Run]) -> list[str]:
    lines = ["## What each system was given", ""]
    lines += [f"- **{system}**: {SETTINGS[system]}" for system in sorted({each for _, each in runs}, key=_place)]
    return [
        *lines,
        "",
        "torchtitan 0.3.0 can be installed, and is not here: its backend for transformers takes causal language models",
        "alone, with its own attention kernel and its own loss, and asks for a nightly build of torch.",
        "",
    ]


def _failures(known: Known, runs: Sequence[Run]) -> list[str]:
    """The table of what is wrong, crashed or hung, and the refusals by message."""
    lines = ["## What is wrong, crashed or hung", ""]
    lines += ["| System | Layout | Classes | | What, for the first of them |", "|---|---|---|---|---|"]
    refusals: dict[str, list[str]] = {}
    for layout, system in runs:
        found = {name: each for (other, where, name), each in known.items() if (other, where) == (system, layout)}
        for name, each in found.items():
            if each.kind == REFUSED:
                refusals.setdefault(f"| {system} | {layout} | {_escaped(each.why)} |", []).append(name)
        if "fault" not in system:
            for names, note in _with_one_cause(system, layout, found):
                first = found[names[0]]
                classes = ", ".join(f"`{name}`" for name in names)
                why = f"{_escaped(first.why)}{_places(found, names)}{f' **{note}**' if note else ''}"
                lines.append(f"| {system} | {layout} | {classes} | {first.kind} | {why} |")
    lines += ["", "One of them again, by itself:", "", "```bash"]
    lines += ["python -m benchmarks.league --prepare environments  # once"]
    lines += [
        "python -m benchmarks.league --systems SYSTEM --layouts LAYOUT --only '^CLASS$' --path environments",
        "```",
    ]
    lines += [
        "",
        "Whether a script of a library's own calls, without the league, does the same: `benchmarks/league/by_hand.py`.",
        "Those of DeepSpeed AutoTP and NeMo Automodel that have a note under tp2 were seen there, too.",
    ]
    lines += ["", "## What is refused", "", "| System | Layout | Message | Classes |", "|---|---|---|---|"]
    return [*lines, *(f"{row} {len(names)} |" for row, names in refusals.items()), ""]


def _with_one_cause(system: str, layout: str, found: Mapping[str, Outcome]) -> list[tuple[list[str], str]]:
    """Return the classes that failed with one note, or without a note in the same words but for numbers, and the note.

    A class that is wrong without a note stands alone: the first module that differs is its own.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, each in found.items():
        if each.kind not in (WRONG, CRASHED, HUNG):
            continue
        note = note_on(system, layout, name)
        words = "" if note else name if each.kind == WRONG else re.sub(r"\d+", "", each.why)
        groups.setdefault((each.kind, note, words), []).append(name)
    return [(names, note) for (_, note, _), names in groups.items()]


def _places(found: Mapping[str, Outcome], names: Sequence[str]) -> str:
    """In which functions of transformers classes crashed, the most frequent ones first."""
    counts = Counter(found[name].place for name in names if found[name].place)
    listed = ", ".join(f"`{place}`" for place, _ in counts.most_common(_MOST_PLACES))
    return f" (in {listed}{', …' if len(counts) > _MOST_PLACES else ''})" if listed else ""


def _escaped(why: str) -> str:
    return why.replace("[", r"\[").replace("*", r"\*")


def _place(system: str) -> int:
    return list(SETTINGS).index(system)


def _layout(name: str) -> int:
    return ("tp2", "pp2", "tp2pp2").index(name)


def _cost(found: Sequence[Outcome]) -> str:
    ratios = [each.seconds / each.plain_seconds for each in found if each.kind == EXACT and each.plain_seconds]
    return f"{statistics.median(ratios):.2f}" if len(ratios) >= _LEAST_RATIOS else ""
