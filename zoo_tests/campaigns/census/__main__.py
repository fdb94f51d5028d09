"""`python -m zoo_tests.campaigns.census`: train every head class sharded and plainly, and write how many agree.

    python -m zoo_tests.campaigns.census --jobs 2 --resume census.jsonl --output docs/results/coverage.md
        [--only PATTERN] [--every N] [--layouts tp2pp2,tp2,pp2,sp2,cp2] [--known FILE] [--again PATTERN]
        [--limit SECONDS]
    python -m zoo_tests.campaigns.census --against 5.17,5.21,5.23 --jobs 2 --output docs/results/releases.md

A run that was killed goes on with the same command: `--resume` names the log that it writes after each class and reads
at the start. `--known` reads the log, the output or the page of another run: with `--again '^family/'`, only the
classes of that family are trained again. `--against` trains the classes of other releases of transformers, and writes
a page of what differs between them.
A class is exact under a layout when two losses and all first gradients agree with plain training in fp32.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import time
import zlib
from pathlib import Path

from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.full_size import full_size_share
from zoo_tests.campaigns.census.jobs import judged
from zoo_tests.campaigns.census.known import known_from
from zoo_tests.campaigns.census.page import write_page
from zoo_tests.campaigns.census.releases import compare_releases
from zoo_tests.campaigns.census.verdict import Verdict, append, read_log

_WRITE_EVERY = 50  # classes


def main() -> None:
    arguments = _arguments()
    layouts = arguments.layouts.split(",")
    if arguments.against:
        sys.exit(compare_releases(arguments.against.split(","), layouts, arguments))
    chosen = [head for head in head_classes() if _is_chosen(head, arguments)]
    verdicts = _known(arguments, chosen, layouts)
    tasks = [(head, layouts, verdicts.get(head)) for head in chosen]
    tasks = [(head, wanted, known) for head, wanted, known in tasks if known is None or known.missing(wanted)]
    start, total = time.monotonic(), len(chosen)
    first = total - len(tasks) + 1
    for done, (head, verdict) in enumerate(judged(tasks, arguments.jobs, arguments.limit), start=first):
        verdicts[head] = verdict
        sys.stdout.write(f"{done}/{total} {head.family}/{head.name}: {verdict}\n")
        sys.stdout.flush()
        if arguments.resume is not None:
            append(arguments.resume, f"{head.family}/{head.name}", verdict)
        if done % _WRITE_EVERY == 0:
            _write(arguments.output, chosen, verdicts, layouts)
    if arguments.output is not None:
        _measure_full_sizes(verdicts, arguments.resume)
    _write(arguments.output, chosen, verdicts, layouts)
    sys.stdout.write(f"{len(tasks)} of {total} classes were trained in {(time.monotonic() - start) / 60:.1f} minutes\n")


def _measure_full_sizes(verdicts: dict[HeadClass, Verdict], log: Path | None) -> None:
    """Add the shares at full size of classes of which something is divided, and write them to the log."""
    for head, verdict in verdicts.items():
        if verdict.share.parameters is not None and verdict.share.full_size is None:
            verdict.share.full_size = full_size_share(head)
            if log is not None and verdict.share.full_size is not None:
                append(log, f"{head.family}/{head.name}", verdict)


def _is_chosen(head: HeadClass, arguments: argparse.Namespace) -> bool:
    """Whether a class is asked for; a checksum of its name chooses a sample, the same one of each release."""
    name = f"{head.family}/{head.name}"
    return bool(re.search(arguments.only, name)) and zlib.crc32(name.encode()) % arguments.every == 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample of one class in N")
    parser.add_argument("--layouts", default="tp2pp2,tp2,pp2", help="tp2 and pp2 only where tp2pp2 is not exact")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time, each with its own ranks")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a class")
    parser.add_argument("--resume", type=Path, help="log of this run (.jsonl): written after each class, read at first")
    parser.add_argument("--known", type=Path, help="log, output or page of another run: its classes are not trained")
    parser.add_argument("--again", help="regular expression on Family/Class: these are, although they are known")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    parser.add_argument("--against", help="releases of transformers to compare, as 5.17,5.21,5.23")
    return parser.parse_args()


def _known(arguments: argparse.Namespace, chosen: list[HeadClass], layouts: list[str]) -> dict[HeadClass, Verdict]:
    known = known_from(arguments.known, layouts)
    if arguments.again is not None:
        known = {name: verdict for name, verdict in known.items() if not re.search(arguments.again, name)}
    if arguments.resume is not None:
        known |= read_log(arguments.resume)
    named = {f"{head.family}/{head.name}": head for head in chosen}
    return {named[name]: verdict for name, verdict in known.items() if name in named}


def _write(page: Path | None, chosen: list[HeadClass], verdicts: dict[HeadClass, Verdict], layouts: list[str]) -> None:
    if page is not None:
        found = {head: verdicts[head] for head in chosen if head in verdicts}
        write_page(page, found, importlib.metadata.version("transformers"), layouts)


if __name__ == "__main__":
    main()
