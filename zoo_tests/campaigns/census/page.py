"""The page of the census."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.verdict import AXES, EXACT, OUTCOMES, Share, Verdict, kind_of

CLASS = "CLASS"  # stands for the name of a class in a sentence that several share
_SHARES = {
    "parameters": "parameters, by two tensor-parallel ranks",
    "flops": "FLOPs of matrix products and attention, by two tensor-parallel ranks",
    "stages": "parameters, by two stages (100 % if the larger has half of them)",
}


def write_page(page: Path, verdicts: dict[HeadClass, Verdict], version: str, layouts: list[str]) -> None:
    """Write the page."""
    lines = [*_head(verdicts, version), *_outcomes(verdicts, layouts), *_shares(verdicts), *_kinds(verdicts)]
    lines += [*_failures(verdicts), *_refusals(verdicts), *_divided(verdicts)]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def outcome_rows(verdicts: dict[str, Verdict] | dict[HeadClass, Verdict], layouts: list[str]) -> Iterator[str]:
    """A table: layout and number of classes of each outcome."""
    yield f"| Layout | {' | '.join(outcome.capitalize() for outcome in OUTCOMES)} |"
    yield "|---" * (len(OUTCOMES) + 1) + "|"
    for layout in layouts:
        counts = Counter(verdict.outcome(layout) for verdict in verdicts.values())
        yield f"| {layout} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |"


def _head(verdicts: dict[HeadClass, Verdict], version: str) -> list[str]:
    both, tp, pp = (sum(each.exact_under(name) for each in verdicts.values()) for name in ("tp2pp2", "tp2", "pp2"))
    plain = sum(verdict.plain != EXACT for verdict in verdicts.values())
    return [
        "# How many head classes of transformers train exactly",
        "",
        "Written by `python -m zoo_tests.campaigns.census --output docs/results/coverage.md`; do not edit.",
        "",
        f"transformers {version} has **{len(verdicts)}** head classes whose forward takes labels.",
        f"**{both}** of them train exactly under tp2·pp2 ({tp} under tp2, {pp} under pp2): two losses",
        "and all first gradients agree with plain training in fp32, on a tiny configuration and a ragged batch that",
        f"the census makes by itself. {plain} do not train even plainly there (a library is missing, or sizes and",
        "inputs have to be made by hand).",
        "",
    ]


def _outcomes(verdicts: dict[HeadClass, Verdict], layouts: list[str]) -> list[str]:
    return [
        "A refusal is one sentence before any training. A class that is exact under tp2·pp2 is counted as exact under",
        "tp2 and pp2. sp2 is tp2 with sequence parallelism, cp2 two ranks that share each sequence.",
        "",
        *outcome_rows(verdicts, layouts),
        "",
    ]


def _shares(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    lines = ["| Share that is divided, of | Classes | Median | Worst | Class with the worst |", "|---|---|---|---|---|"]
    for name, meaning in _SHARES.items():
        measured = {head: share for head, each in verdicts.items() if (share := getattr(each.share, name)) is not None}
        if measured:
            worst = min(measured, key=measured.__getitem__)
            values = f"{median(measured.values()):.0%} | {measured[worst]:.0%} | `{worst.name}`"
            lines.append(f"| {meaning} | {len(measured)} | {values} |")
    return [
        "Exact does not say how much is cut. Of tiny models that are exact under tp2 or pp2:",
        "",
        *lines,
        "",
    ]


def _kinds(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    kinds = Counter(head.kind for head in verdicts)
    exact = Counter(head.kind for head, verdict in verdicts.items() if verdict.exact_under("tp2pp2"))
    rows = [f"| {kind} | {count} | {exact[kind]} |" for kind, count in kinds.most_common()]
    return ["| Kind | Classes | Exact under tp2·pp2 |", "|---|---|---|", *rows, ""]


def _failures(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    lines = ["## Those that do not, and why", "", "| Class | Where | Reason |", "|---|---|---|"]
    for head, verdict in verdicts.items():
        for where, reason in verdict.failures():
            if not _is_grouped(where, reason):
                shown = reason.replace("[", r"\[")  # Markdown takes [a][b] for a link
                lines.append(f"| `{head.name}` | {where} | {shown} |")
    return lines


def _refusals(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    """What layouts beyond `AXES` refuse, by sentence: many families have no sequence to divide."""
    names: dict[tuple[str, str], list[str]] = {}
    for head, verdict in verdicts.items():
        for where, reason in verdict.failures():
            if _is_grouped(where, reason):
                sentence = reason.replace(head.name, CLASS).replace("[", r"\[")
                names.setdefault((where, sentence), []).append(f"`{head.name}`")
    ordered = sorted(names.items(), key=lambda item: (item[0][0], -len(item[1])))
    rows = [f"| {where} | {reason} | {len(each)} | {', '.join(each)} |" for (where, reason), each in ordered]
    titles = "| Refused under | Reason | Number | Classes |"
    return ["", "## What sp2 and cp2 refuse", "", titles, "|---|---|---|---|", *rows] if rows else []


def _is_grouped(where: str, reason: str) -> bool:
    return where not in ("plain", *AXES) and kind_of(reason) == "refused"


def _divided(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    rows = [
        f"| `{head.name}` | {' | '.join(_percent(getattr(each.share, name)) for name in _SHARES)} |"
        for head, each in verdicts.items()
        if each.share != Share()
    ]
    titles = "| Divided | Parameters, tp2 | FLOPs, tp2 | Parameters, pp2 |"
    return ["", "## What is divided of each class", "", titles, "|---|---|---|---|", *rows] if rows else []


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
