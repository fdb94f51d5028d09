"""`python -m zoo_tests.campaigns.census`: train every head class sharded and plainly, and write how many agree.

    python -m zoo_tests.campaigns.census --output docs/results/coverage.md
        [--only PATTERN] [--layouts LAYOUTS] [--known FILE] [--again PATTERN]

What it prints is the log that `--known` reads, so that an interrupted run goes on. `--known` also reads the page: with
`--again '^family/'`, only the classes of that family are trained again.
A class is exact under a layout when two losses and all first gradients agree with plain training in fp32.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import transformers

from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import Verdict, plain_run, refusal, sharded_verdict
from zoo_tests.docs.pages import rows_of
from zoo_tests.harness.ranks import stop_pools

EXACT = "exact"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--layouts", default="tp2pp2,tp2,pp2", help="the first; the others where it is not exact")
    parser.add_argument("--known", type=Path, help="log or page of an earlier run: its classes are not trained again")
    parser.add_argument("--again", help="regular expression on Family/Class: these are, although they are known")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    arguments = parser.parse_args()
    chosen = [head for head in head_classes() if re.search(arguments.only, f"{head.family}/{head.name}")]
    layouts = arguments.layouts.split(",")
    known = _known(arguments.known, layouts)
    if arguments.again is not None:
        known = {name: verdict for name, verdict in known.items() if not re.search(arguments.again, name)}
    verdicts: dict[HeadClass, Verdict] = {}
    for number, head in enumerate(chosen, start=1):
        verdicts[head] = known.get(f"{head.family}/{head.name}") or _judge(head, layouts)
        sys.stdout.write(f"{number}/{len(chosen)} {head.family}/{head.name}: {verdicts[head]}\n")
        sys.stdout.flush()
        if arguments.output is not None and (number % 50 == 0 or number == len(chosen)):
            arguments.output.write_text(_page(verdicts), encoding="utf-8")
    stop_pools()


def _known(file: Path | None, layouts: list[str]) -> dict[str, Verdict]:
    """Family/class -> verdict, of a log or of the page."""
    if file is None:
        return {}
    return _read_page(file, layouts) if file.suffix == ".md" else _read_log(file, layouts)


def _read_page(page: Path, layouts: list[str]) -> dict[str, Verdict]:
    """Family/class -> verdict: what the page does not list is exact."""
    failures: dict[str, dict[str, str]] = {}
    for name, where, reason in rows_of(page, "Class"):
        failures.setdefault(name.strip("`"), {})[where] = reason.replace(r"\[", "[")
    found = {}
    for head in head_classes():
        listed = dict(failures.get(head.name, {}))
        plain = listed.pop("plain", EXACT)
        judged = {name: listed.get(name, EXACT) for name in layouts} if listed else {layouts[0]: EXACT}
        found[f"{head.family}/{head.name}"] = Verdict(plain, judged if plain == EXACT else {})
    return found


def _read_log(log: Path, layouts: list[str]) -> dict[str, Verdict]:
    """Family/class -> verdict, of the lines of a log; the last of several counts."""
    found = {}
    for name, text in re.findall(r"^\d+/\d+ (\S+): (.*)$", log.read_text(encoding="utf-8"), flags=re.MULTILINE):
        reasons = dict(
            re.findall(rf"(?:^|; )(plain|{'|'.join(layouts)}): (.*?)(?=; (?:{'|'.join(layouts)}): |$)", text)
        )
        plain = reasons.pop("plain", EXACT)
        judged = {layouts[0]: EXACT} if text == EXACT else {name: reasons.get(name, EXACT) for name in layouts}
        found[name] = Verdict(plain, judged if plain == EXACT else {})
    return found


def _judge(head: HeadClass, layouts: list[str]) -> Verdict:
    if (reason := refusal(head)) is not None:  # nothing to train
        return Verdict(plain=EXACT, layouts=dict.fromkeys(layouts, reason))
    plain = plain_run(head)
    if isinstance(plain, str):
        return Verdict(plain=plain)
    verdict = Verdict(plain=EXACT)
    for layout in layouts:
        verdict.layouts[layout] = sharded_verdict(head, layout, plain)
        if layout == layouts[0] and verdict.layouts[layout] == EXACT:
            break
    return verdict


def _page(verdicts: dict[HeadClass, Verdict]) -> str:
    both = [head for head, verdict in verdicts.items() if verdict.exact_under("tp2pp2")]
    tp = [head for head, verdict in verdicts.items() if verdict.exact_under("tp2")]
    pp = [head for head, verdict in verdicts.items() if verdict.exact_under("pp2")]
    plain = [head for head, verdict in verdicts.items() if verdict.plain != EXACT]
    kinds, exact = Counter(head.kind for head in verdicts), Counter(head.kind for head in both)
    lines = [
        "# How many head classes of transformers train exactly",
        "",
        "Written by `python -m zoo_tests.campaigns.census --output docs/results/coverage.md`; do not edit.",
        "",
        f"transformers {transformers.__version__} has **{len(verdicts)}** head classes whose forward takes labels.",
        f"**{len(both)}** of them train exactly under tp2·pp2 ({len(tp)} under tp2, {len(pp)} under pp2): two losses",
        "and all first gradients agree with plain training in fp32, on a tiny configuration and a ragged batch that",
        f"the census makes by itself. {len(plain)} do not train even plainly there (a library is missing, or sizes and",
        "inputs have to be made by hand). Exact does not say how much is cut: [families](../families.md) and plans do.",
        "",
        "| Kind | Classes | Exact under tp2·pp2 |",
        "|---|---|---|",
        *(f"| {kind} | {count} | {exact[kind]} |" for kind, count in kinds.most_common()),
        "",
        "## Those that do not, and why",
        "",
        "| Class | Where | Reason |",
        "|---|---|---|",
    ]
    for head, verdict in verdicts.items():
        for where, reason in verdict.failures():
            shown = reason.replace("[", r"\[")  # Markdown takes [a][b] for a link
            lines.append(f"| `{head.name}` | {where} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
