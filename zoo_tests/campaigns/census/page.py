"""The page of the census."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.reasons import NOT_IN_STAGES
from zoo_tests.campaigns.census.verdict import AXES, EXACT, OUTCOMES, WITH_CRITERION, Share, Verdict, kind_of

CLASS = "CLASS"  # stands for the name of a class in a sentence that several share
_SHARES = {
    "parameters": "parameters, by two tensor-parallel ranks",
    "flops": "FLOPs of matrix products and attention, by two tensor-parallel ranks",
    "stages": "parameters, by two stages (100 % if the larger has half of them)",
    "full_size": "parameters at the sizes of the default configuration, by two tensor-parallel ranks",
}


def write_page(page: Path, verdicts: dict[HeadClass, Verdict], version: str, layouts: list[str]) -> None:
    """Write the page."""
    lines = [*_head(verdicts, version), *_outcomes(verdicts, layouts), *_shares(verdicts), *_kinds(verdicts)]
    lines += [*_with_criterion(verdicts), *_failures(verdicts), *_refusals(verdicts), *_divided(verdicts)]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def outcome_rows(verdicts: dict[str, Verdict] | dict[HeadClass, Verdict], layouts: list[str]) -> Iterator[str]:
    """A table: layout and number of classes of each outcome."""
    yield f"| Layout | {' | '.join(outcome.capitalize() for outcome in OUTCOMES)} |"
    yield "|---" * (len(OUTCOMES) + 1) + "|"
    for layout in layouts:
        counts = Counter(verdict.outcome(layout) for verdict in verdicts.values())
        yield f"| {layout} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |"


def _head(verdicts: dict[HeadClass, Verdict], version: str) -> list[str]:
    counts = {name: Counter(verdict.outcome(name) for verdict in verdicts.values()) for name in AXES}
    both, tp, pp = (counts[name][EXACT] for name in AXES)
    more, more_tp, more_pp = (counts[name][WITH_CRITERION] for name in AXES)
    plain = sum(verdict.plain != EXACT for verdict in verdicts.values())
    return [
        "# How many head classes of transformers train exactly",
        "",
        "Written by `python -m zoo_tests.campaigns.census --output docs/results/coverage.md`; do not edit.",
        "",
        f"transformers {version} has **{len(verdicts)}** head classes whose forward takes labels.",
        f"**{both}** of them train exactly with the loss that they compute from these under tp2·pp2 ({tp} under tp2,",
        f"{pp} under pp2): two losses and all first gradients agree with plain training in fp32, on a tiny",
        "configuration and a ragged batch that the census makes by itself. Models of text and images, or sound, get",
        "text alone; [images](images.md) has those that were trained with images, too.",
        "",
        f"{more} more train exactly with a criterion of the script's over their outputs, because transformers computes",
        f"no loss that could be trained here ({more_tp} under tp2, {more_pp} under pp2): {both + more} together. They",
        "are compared with plain transformers and the same criterion.",
        "",
        f"{plain} do not train even plainly there.",
        "",
    ]


def _outcomes(verdicts: dict[HeadClass, Verdict], layouts: list[str]) -> list[str]:
    return [
        "A refusal is one sentence before any training. A class that is exact under tp2·pp2 is counted as exact under",
        "tp2 and pp2. sp2 is tp2 with sequence parallelism, cp2 two ranks that share each sequence by ring attention,",
        "cp2-ulysses by `sequence_parallelism_mode='all_to_all'`.",
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
        "Exact does not say how much is cut. Of tiny models that are exact under tp2 or pp2 (embeddings of positions,",
        "norms and routers are a larger part of these than of models at full size):",
        "",
        *lines,
        "",
    ]


def _kinds(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    kinds = Counter(head.kind for head in verdicts)
    counts = Counter((head.kind, verdict.outcome("tp2pp2")) for head, verdict in verdicts.items())
    rows = [
        f"| {kind} | {count} | {counts[kind, EXACT]} | {counts[kind, WITH_CRITERION]} |"
        for kind, count in kinds.most_common()
    ]
    return ["| Kind | Classes | Exact under tp2·pp2 | With a criterion |", "|---|---|---|---|", *rows, ""]


def _with_criterion(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    rows = [f"| `{head.name}` | {_cell(each.criterion)} |" for head, each in verdicts.items() if each.criterion]
    titles = "| Trained with a criterion | Why not with its own loss |"
    return ["## With a criterion of the script's", "", titles, "|---|---|", *rows, ""] if rows else []


def _failures(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    lines = ["## Those that do not, and why", "", "| Class | Where | Reason |", "|---|---|---|"]
    for head, verdict in verdicts.items():
        for where, reason in verdict.failures():
            if not _is_grouped(where, reason):
                lines.append(f"| `{head.name}` | {where} | {_cell(reason)} |")
    refused = {head.name for head, verdict in verdicts.items() if verdict.outcome("pp2") == "refused"}
    rows = [f"| `{name}` | {why} |" for name, why in NOT_IN_STAGES.items() if name in refused]
    return [*lines, "", "| Not in stages | Why |", "|---|---|", *rows] if rows else lines


def _cell(reason: str) -> str:
    """A reason in a table: Markdown takes [a][b] for a link."""
    return reason.replace("[", r"\[")


def _refusals(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    """What layouts beyond `AXES` refuse, by sentence: many families have no sequence to divide."""
    names: dict[tuple[str, str], list[str]] = {}
    sentences: dict[tuple[str, str], str] = {}
    for head, verdict in verdicts.items():
        for where, reason in verdict.failures():
            if _is_grouped(where, reason):
                sentence = _cell(reason.replace(head.name, CLASS))
                key = where, sentence.partition("; use ")[0]
                names.setdefault(key, []).append(f"`{head.name}`")
                if sentences.setdefault(key, sentence).endswith("…"):  # of a long name the end is cut off
                    sentences[key] = sentence
    ordered = sorted(names.items(), key=lambda item: (item[0][0], -len(item[1])))
    rows = [f"| {key[0]} | {sentences[key]} | {len(each)} | {', '.join(each)} |" for key, each in ordered]
    titles = "| Refused under | Reason | Number | Classes |"
    return ["", "## What sp2, cp2 and cp2-ulysses refuse", "", titles, "|---|---|---|---|", *rows] if rows else []


def _is_grouped(where: str, reason: str) -> bool:
    return where not in ("plain", *AXES) and kind_of(reason) == "refused"


def _divided(verdicts: dict[HeadClass, Verdict]) -> list[str]:
    rows = [
        f"| `{head.name}` | {' | '.join(_percent(getattr(each.share, name)) for name in _SHARES)} |"
        for head, each in verdicts.items()
        if each.share != Share()
    ]
    titles = "| Divided | Parameters, tp2 | FLOPs, tp2 | Parameters, pp2 | Parameters at full size, tp2 |"
    return ["", "## What is divided of each class", "", titles, "|---|---|---|---|---|", *rows] if rows else []


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
