"""The page of a campaign: what was survived, and the seconds to the next step by part."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import torch

from zoo_tests.campaigns.elastic.kills import KINDS, PARTS, RELAYOUT, SAVE, Kill

_WITHIN_S = 10.0
_TITLES = {
    "llama": "A Llama under tp 2 x pp 2, pp 4, tp 2 x dp 2 in turn",
    "small": "Replicas of a classifier under ZeRO 1, 3, 2 in turn",
}
_PAGE = """# Kills of elastic jobs

Written by `python -m zoo_tests.campaigns.elastic --log kills.jsonl --output docs/results/elastic.md`. Jobs of four
ranks on two agents ([elastic jobs](../elastic.md)) save a checkpoint on disk every 7 steps and change their layout
every 10. What is killed, and when, is drawn. Survived: the job makes a new step, each step of it was made, and all
losses equal those of the undisturbed job in one process within 1e-9 (fp64). Seconds count from the last signal to the
end of the next step; medians, by part. torch {torch}, {cores} cores.
{tables}
"""


def page(kills: Sequence[Kill], cores: int) -> str:
    """Return the page about kills."""
    jobs = dict.fromkeys(kill.job for kill in kills)
    tables = "\n".join(_section(_TITLES[job], [kill for kill in kills if kill.job == job]) for job in jobs)
    return _PAGE.format(torch=torch.__version__, cores=cores, tables=tables)


def _section(title: str, kills: Sequence[Kill]) -> str:
    good = [kill for kill in kills if not kill.problem]
    soon = sum(kill.seconds <= _WITHIN_S for kill in good)
    seconds = [kill.seconds for kill in good] or [float("nan")]
    lines = [
        f"\n## {title}\n",
        f"{len(good)} of {len(kills)} kills survived, {soon} of them within {_WITHIN_S:g} s; median "
        f"{statistics.median(seconds):.1f} s, slowest {max(seconds):.1f} s.{_inside(good)}\n",
        f"| Kill | Survived | Seconds | Slowest | {' | '.join(part.capitalize() for part in PARTS)} |",
        "|---" * (4 + len(PARTS)) + "|",
    ]
    lines += [_row(KINDS[kind], [kill for kill in kills if kill.kind == kind]) for kind in KINDS]
    lines = [line for line in lines if line]
    return "\n".join([*lines, *_layouts(good)])


def _inside(kills: Sequence[Kill]) -> str:
    parts = []
    for kind in (SAVE, RELAYOUT):
        found = [kill.is_during for kill in kills if kill.kind == kind]
        if found:
            parts.append(f"{sum(found)} of {len(found)} kills of a {kind} struck before the rank had finished it")
    return f" {' and '.join(parts)}." if parts else ""


def _row(name: str, kills: Sequence[Kill]) -> str:
    good = [kill for kill in kills if not kill.problem]
    if not good:
        return f"| {name} | 0 of {len(kills)} |" + " - |" * (2 + len(PARTS)) if kills else ""
    seconds = [kill.seconds for kill in good]
    parts = " | ".join(f"{statistics.median(kill.parts[part] for kill in good):.1f}" for part in PARTS)
    return f"| {name} | {len(good)} of {len(kills)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | {parts} |"


def _layouts(kills: Sequence[Kill]) -> list[str]:
    """How often which layout was taken, and by whom."""
    counts = Counter((kill.layout, kill.plan_s is not None) for kill in kills)
    rows = [f"| {layout} | {'planner' if planned else 'script, or a part of its layout'} | {count} |"
            for (layout, planned), count in counts.most_common()]  # fmt: skip
    plans = [kill.plan_s for kill in kills if kill.plan_s is not None]
    said = f" A plan took the planner up to {max(plans):.2f} s, ahead of the kill." if plans else ""
    return [
        f"\nLayouts of the first round after a kill.{said}\n",
        "| Layout | Chosen by | Kills |",
        "|---|---|---|",
        *rows,
    ]
