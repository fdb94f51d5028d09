"""What earlier runs say: their log, their output, or the page."""

from __future__ import annotations

import re
from pathlib import Path

from zoo_tests.campaigns.census.classes import head_classes
from zoo_tests.campaigns.census.page import CLASS
from zoo_tests.campaigns.census.verdict import AXES, EXACT, Share, Verdict, read_log
from zoo_tests.docs.pages import rows_of


def known_from(file: Path | None, layouts: list[str]) -> dict[str, Verdict]:
    """Family/class -> verdict, of the page (`.md`), a log (`.jsonl`), or the lines that a run has printed."""
    if file is None:
        return {}
    if file.suffix == ".md":
        return _read_page(file, layouts)
    return read_log(file) if file.suffix == ".jsonl" else _read_output(file, layouts)


def _read_page(page: Path, layouts: list[str]) -> dict[str, Verdict]:
    """Family/class -> verdict: what the page does not list is exact."""
    failures: dict[str, dict[str, str]] = {}
    for name, where, reason in rows_of(page, "Class"):
        failures.setdefault(name.strip("`"), {})[where] = reason.replace(r"\[", "[")
    for where, reason, _, names in rows_of(page, "Refused under"):
        for name in (each.strip("`") for each in names.split(", ")):
            failures.setdefault(name, {})[where] = reason.replace(CLASS, name).replace(r"\[", "[")
    shares = {name.strip("`"): Share(*map(_fraction, cells)) for name, *cells in rows_of(page, "Divided")}
    criteria = {name.strip("`"): why.replace(r"\[", "[") for name, why in rows_of(page, "Trained with a criterion")}
    trained = {layout for layout, *_ in rows_of(page, "Layout")}
    found = {}
    for head in head_classes():
        listed = dict(failures.get(head.name, {}))
        verdict = Verdict(listed.pop("plain", EXACT), share=shares.get(head.name, Share()))
        verdict.criterion = criteria.get(head.name, "")
        for layout in verdict.missing(layouts):
            if layout in trained and not verdict.exact_under(layout):
                verdict.layouts[layout] = listed.get(layout, EXACT)
        found[f"{head.family}/{head.name}"] = verdict
    return found


def _fraction(cell: str) -> float | None:
    return int(cell.removesuffix("%")) / 100 if cell.endswith("%") else None


def _read_output(output: Path, layouts: list[str]) -> dict[str, Verdict]:
    """Family/class -> verdict, of the lines that a run has printed; the last of several counts."""
    found = {}
    for name, text in re.findall(r"^\d+/\d+ (\S+): (.*)$", output.read_text(encoding="utf-8"), flags=re.MULTILINE):
        reasons = dict(
            re.findall(rf"(?:^|; )(plain|{'|'.join(layouts)}): (.*?)(?=; (?:{'|'.join(layouts)}): |$)", text)
        )
        plain = reasons.pop("plain", EXACT)
        # It does not tell which layouts were trained beyond the first: those of both axes, if that one failed.
        told = [name for name in layouts if name in reasons or name in AXES]
        judged = {layouts[0]: EXACT} if text == EXACT else {name: reasons.get(name, EXACT) for name in told}
        found[name] = Verdict(plain, judged if plain == EXACT else {})
    return found
