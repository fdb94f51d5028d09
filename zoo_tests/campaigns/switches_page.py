"""The page of the campaign of switches, and the verdicts that are kept for it: counts by class, of all runs so far.

`switches.json` has, for switches that were turned alone and for sets of switches, layout -> verdict -> family/class ->
number. A family that was tried again under a layout replaces what was kept of it there. The layout "plain" has those
that train neither way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from zoo_tests.campaigns.census.verdict import EXACT, kind_of

AND, ALONE, TOGETHER, PLAIN = " & ", "alone", "together", "plain"
_KEPT = Path(__file__).with_name("switches.json")
_REFUSAL = "booster.errors.ConfigurationError: "
_LAYOUTS = ("tp2", "pp2", "sp2", "sp2-ulysses", "cp2", "cp2-ulysses", "ep2")  # in the order of columns
_FAILS = "does not train"
# "alone" or "together" -> layout -> verdict -> family/class -> number of switches or sets
Kept = dict[str, dict[str, dict[str, dict[str, int]]]]
_HEAD = """# Switches of configurations

Written by `python -m zoo_tests.campaigns.switches --output docs/results/switches.md`; do not edit.

A tiny model of one class of each family is trained on two ranks and plainly, with one field of its configuration
changed at a time: truth values, names, numbers of key heads, sizes that may be absent, factors of 1. Then all of them
are changed at once. The loss and every gradient are compared. Changes that change nothing are left out. The tables say
how many families a layout was tried on; sp2 is tp2 with sequence parallelism, and "-ulysses" is
`sequence_parallelism_mode="all_to_all"`.
"""
_EARLIER_FAMILIES = 394
_EARLIER = """Before verdicts were kept by family, 1,754 switches of 394 families were tried under tp2 (1,749 exact, 3
refused) and pp2 (1,349, 30), and those of 84 families under the four layouts of sequences (1,543, 149).
"""
_TOGETHER = """
## Together

All switches of a family at once, or as many as train plainly and are exact; what was taken out is tried without them.
"""
_BY_FAMILY = """
## By family

Switches and sets of switches that are exact, of those tried; the others are refused in a sentence.
"""
_REFUSED = """
## What is not exact

Each sentence with the number of switches and sets that it is said of, layouts and classes.
"""


def read_kept() -> Kept:
    """What was kept."""
    return json.loads(_KEPT.read_text(encoding="utf-8"))


def write_kept(kept: Kept) -> None:
    """Keep verdicts, one a line."""
    lines = []
    for way, layouts in kept.items():
        cells = (
            f"{json.dumps(layout)}: {{\n"
            + ",\n".join(f"{json.dumps(verdict)}: {json.dumps(names)}" for verdict, names in verdicts.items())
            + "\n}"
            for layout, verdicts in layouts.items()
        )
        lines.append(f"{json.dumps(way)}: {{\n" + ",\n".join(cells) + "\n}")
    _KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def with_rows(kept: Kept, rows: Iterable[tuple[str, str, Mapping[str, str] | None]], together: bool) -> Kept:
    """Return what was kept and the rows of a log: of the families that were tried to their end.

    Args:
        rows: family/class, switches, and layout -> verdict; of the same with other layouts, too.
        together: whether the switches of a family were turned at once.
    """
    rows = list(rows)
    ended = {name for name, switch, _ in rows if switch in ("", TOGETHER)}
    found: dict[tuple[str, str], dict[str, str]] = {}  # layout, name -> switches -> verdict
    for name, switch, verdicts in rows:
        if switch not in ("", TOGETHER) and name in ended:
            for layout, said in (verdicts or {}).items():
                found.setdefault((layout, name), {})[switch] = said
    made: Kept = json.loads(json.dumps(kept))
    layouts = made.setdefault(TOGETHER if together else ALONE, {})
    for (layout, name), verdicts in found.items():
        said_of = layouts.setdefault(layout, {})
        for names in said_of.values():
            names.pop(name, None)
        for said in verdicts.values():
            names = said_of.setdefault(_FAILS if layout == PLAIN else _sentence(said, name), {})
            names[name] = names.get(name, 0) + 1
        layouts[layout] = {said: dict(sorted(names.items())) for said, names in said_of.items() if names}
    return made


def _sentence(verdict: str, name: str) -> str:
    """A verdict without the name of the class: its reason and the first way out."""
    words = verdict.replace(name.partition("/")[2], "the class").split("; ")
    return "; ".join(word for word in words[:2] if not (word.endswith("…") and len(words) > 1))


def page(kept: Kept) -> str:
    """The page of the documentation."""
    tried = {name for layouts in kept.values() for at in layouts.values() for names in at.values() for name in names}
    alone = kept.get(ALONE, {})
    plain = sum(sum(names.values()) for way in kept.values() for names in way.get(PLAIN, {}).values())
    count = max((sum(_counts(at).values()) for layout, at in alone.items() if layout != PLAIN), default=0)
    parts = [_HEAD, f"{count} switches of {len(tried)} families; {plain} others do not train plainly.", ""]
    if len({name for names in alone.get("tp2", {}).values() for name in names}) < _EARLIER_FAMILIES:
        parts.append(_EARLIER)
    parts += [*_table(alone), _TOGETHER, *_table(kept.get(TOGETHER, {})), _BY_FAMILY, *_by_family(kept), _REFUSED]
    return "\n".join([*parts, *_reasons(kept), ""])


def _columns(layouts: Iterable[str]) -> list[str]:
    known = set(layouts) - {PLAIN}
    return [*(each for each in _LAYOUTS if each in known), *sorted(known - set(_LAYOUTS))]


def _counts(verdicts: Mapping[str, Mapping[str, int]], name: str | None = None) -> Counter[str]:
    """The number of "exact", "refused" and other verdicts, of a class or of all."""
    counts: Counter[str] = Counter()
    for said, names in verdicts.items():
        kind = kind_of(said)
        number = sum(names.values()) if name is None else names.get(name, 0)
        counts[kind if kind in (EXACT, "refused") else "other"] += number
    return counts


def _table(layouts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Iterator[str]:
    yield from ("| Layout | families | exact | refused | other |", "|---|---|---|---|---|")
    for layout in _columns(layouts):
        families = {name for names in layouts[layout].values() for name in names}
        counts = _counts(layouts[layout])
        yield f"| {layout} | {len(families)} | {counts[EXACT]} | {counts['refused']} | {counts['other']} |"


def _by_family(kept: Kept) -> Iterator[str]:
    """A line for each class: exact of tried, under each layout."""
    columns = _columns(layout for layouts in kept.values() for layout in layouts)
    names = {name for way in kept.values() for at in way.values() for names in at.values() for name in names}
    yield f"| Family | Class | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 2) + "|"
    for name in sorted(names):
        cells = []
        for layout in columns:
            counts = sum((_counts(way.get(layout, {}), name) for way in kept.values()), Counter())
            tried = sum(counts.values())
            other = f", {counts['other']} other" if counts["other"] else ""
            cells.append(f"{counts[EXACT]} of {tried}{other}" if tried else "–")
        family, _, head = name.partition("/")
        if set(cells) != {"–"}:
            yield f"| {family} | {head} | {' | '.join(cells)} |"


def _reasons(kept: Kept) -> Iterator[str]:
    """A line for each sentence: where it is said, how often, and of which classes."""
    said: dict[str, tuple[dict[str, None], Counter[str]]] = {}
    for layouts in kept.values():
        for layout in _columns(layouts):
            for sentence, names in layouts[layout].items():
                if sentence != EXACT:
                    at, counts = said.setdefault(sentence.removeprefix(_REFUSAL), ({}, Counter()))
                    at[layout] = None
                    counts.update({name.partition("/")[2]: count for name, count in names.items()})
    for sentence, (at, counts) in sorted(said.items()):
        yield f"- {sentence} ({counts.total()} under {', '.join(at)}): {', '.join(sorted(counts))}"
