"""Runs a script plainly and in parallel, and says how the two compare."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zoo_tests.harness.ranks import RankError, run_on_ranks
from zoo_tests.scripts.port import LAYOUTS, plain, ported

EXACT, REFUSED, DIFFERS, CRASHES, HANGS = "exact", "refused", "differs", "crashes", "hangs"
WARNED = "differs, with a warning"
_DIFFERENCE = re.compile(r".*differ from those of .*")  # as the library's warnings say it
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_TOLERANCE = 1e-6  # of fp64: transformers computes the loss of a language model in fp32
_IN_FP32 = {"route_experts": 1e-5}  # torch multiplies groups of experts in fp32 and less: name -> tolerance
_PACKAGES = ("/booster/", "/plugins/hybrid_parallel/", "/shardformer/")


@dataclass(frozen=True)
class Ended:
    """What one process of a script left.

    Attributes:
        printed: its standard output.
        error: class and message of what it raised, None where it ended well.
        ours: whether the error was raised by this library.
        warning: what the library logged about numbers that are not those of a plain script.
    """

    printed: str
    error: str | None = None
    ours: bool = False
    warning: str = ""


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""


def run_source(source: str, name: str, directory: str) -> Ended:
    """Run a script here, in fp64 where it can be, in `directory`."""
    before, printed = os.getcwd(), io.StringIO()
    logged, listener = io.StringIO(), logging.getLogger("plugins.hybrid_parallel")
    handler = logging.StreamHandler(logged)
    listener.addHandler(handler)
    os.chdir(directory)
    torch.set_default_dtype(torch.float32 if name in _IN_FP32 else torch.float64)
    try:
        with contextlib.redirect_stdout(printed):
            # As of a file: what a module's forward calls is read from its source.
            linecache.cache[f"{name}.py"] = (len(source), None, source.splitlines(keepends=True), f"{name}.py")
            exec(compile(source, f"{name}.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        if os.environ.get("SCRIPT_TRACEBACK"):
            traceback.print_exc(file=sys.stderr)
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = any(package in place for package in _PACKAGES)
        return Ended(printed.getvalue(), f"{type(error).__name__}: {error}", ours)
    finally:
        listener.removeHandler(handler)
        os.chdir(before)
        torch.set_default_dtype(torch.float32)
    warning = _DIFFERENCE.search(logged.getvalue())
    return Ended(printed.getvalue(), warning=warning[0] if warning else "")


def compare(name: str, directory: Path) -> dict[str, Outcome]:
    """Run a script by itself, and on two ranks under each layout: layout -> how that went."""
    (expected,) = run_on_ranks(1, run_source, plain(name), name, _folder(directory, "plain"))
    assert expected.error is None, f"{name} does not run plainly: {expected.error}"
    outcomes = {}
    for layout in LAYOUTS:
        try:
            ranks = run_on_ranks(2, run_source, ported(name, layout), name, _folder(directory, layout))
            outcomes[layout] = _judge(expected, ranks, _IN_FP32.get(name, _TOLERANCE), layout == "dp2")
        except RankError as error:
            outcomes[layout] = Outcome(HANGS, str(error))
    return outcomes


def _folder(parent: Path, name: str) -> str:
    (parent / name).mkdir()
    return str(parent / name)


def _judge(expected: Ended, ranks: list[Ended], tolerance: float, averages: bool) -> Outcome:
    """`averages`: compare the mean over the ranks, not each of them."""
    # A sentence may say which rank or stage it is.
    errors = {rank.error and re.sub(r"\b(rank|stage) \d", r"\1 …", rank.error) for rank in ranks}
    if errors != {None}:
        is_refusal = len(errors) == 1 and all(rank.ours for rank in ranks) and "\n" not in next(iter(errors))
        return Outcome(REFUSED if is_refusal else CRASHES, " | ".join(sorted(map(str, errors))))
    wanted, *printed = (_numbers(each.printed) for each in (expected, *ranks))
    if any(len(numbers) != len(wanted) for numbers in printed):
        return Outcome(DIFFERS, f"ranks print {[len(numbers) for numbers in printed]} numbers, not {len(wanted)}")
    for number, *got in zip(wanted, *printed, strict=True):
        # A loss that a script computes itself is that of its replica's samples.
        errors = [sum(got) / len(got) - number] if averages else [each - number for each in got]
        if any(abs(error) > tolerance * max(1.0, abs(number)) for error in errors):
            said = ranks[0].warning
            return Outcome(WARNED, said) if said else Outcome(DIFFERS, f"ranks print {got} for {number}")
    return Outcome(EXACT)


def _numbers(printed: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(printed)]


def head_of_table(kinds: Iterable[str], columns: Sequence[str]) -> list[str]:
    """The first lines of a table of runs: how many are of each kind, and the names of the columns."""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds).items()))
    return [f"Runs: {counts}.", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def put_into(page: Path, mark: str, text: str) -> None:
    """Replace what is between two marks of a page."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")
