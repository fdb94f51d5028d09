"""What the layout check finds and on what it is silent, without ranks.

    python -m zoo_tests.campaigns.checked mutants [--only REGEX]
    python -m zoo_tests.campaigns.checked classes [--only REGEX] [--log FILE] [--minutes N]
    python -m zoo_tests.campaigns.checked meshes [--only REGEX] [--log FILE]
    python -m zoo_tests.campaigns.checked page --log FILE --output docs/results/layout_check.md

- mutants: each mutant of the sharding engine whose tests train a case of the zoo is put into a process of its own,
  where the check gets the model and the layout of that case. Found: it has a finding, or no copy trains.
- classes: each head class of the census in its default configuration, which trains exactly, under six layouts. A
  finding is a false alarm.
- meshes: the ten largest published configurations on 65,536 ranks, and the seconds of a processor for a check.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plugins.hybrid_parallel.verify.before_boost import LayoutReport
from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import twin_of
from zoo_tests.campaigns.census.verdict import add_row, read_rows
from zoo_tests.campaigns.mutations.mutants import MUTANTS
from zoo_tests.campaigns.published import published
from zoo_tests.harness.case import Case

_ID = re.compile(r"(?P<file>[\w/]+)\.py::(?P<test>\w+)\[(?P<case>.+)\]")
# Options of a case that the check leaves to the tests: kernels, precision, files.
_LEFT_OUT = ("seed", "initial_scale", "zero_bucket_size_in_mb")
_SP = {"tp_size": 2, "enable_sequence_parallelism": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "sp2": _SP,
    "cp2": {"cp_size": 2},
    "all-to-all": {**_SP, "sequence_parallelism_mode": "all_to_all"},
    "ep2": {"ep_size": 2},
}
_MESH = {"tp_size": 8, "cp_size": 8, "pp_size": 16, "num_microbatches": 64}
_MESH_RANKS = 8 * 8 * 16 * 64
_OTHER_PARTS = "its parameters are not those"
_MUTANTS = "{} of {} faults of the sharding engine that the mutation campaign plants are found. Not found: {}."
_PAGE = """# The layout check

Written by `python -m zoo_tests.campaigns.checked page`; do not edit.

## What it finds

Thirty faults of all kinds are planted into modeling code by its tests (`test_layout_check.py`), which find each.
{mutants}

## False alarms

Head classes of transformers in their default configurations, without ranks; {no_model} are not built so. A layout is
refused by a sentence with a way out, as `boost` refuses it. It is not tried where no small copy trains plainly: the
class does not train, draws numbers, or stays large. Either is told in one line, and is no finding.

| Layout | Classes | exact | refused | not tried | false alarms |
|---|---|---|---|---|---|
{rows}

{told}

## Large meshes

Published configurations under tp8, cp8, pp16 and dp64, with true sizes: seconds of one processor for the check.

| Checkpoint | Parameters | Seconds | |
|---|---|---|---|
{meshes}
"""
LARGEST = (
    *("Kimi K2", "Llama 4 Maverick", "DeepSeek-V3", "DeepSeek-R1", "MiniMax-Text-01", "GLM-4.5", "MiniMax-M2"),
    *("dots.llm1", "Command R+", "GLM-4.5-Air"),
)


def cases() -> Iterator[tuple[str, Case]]:
    """Yield each mutant of the sharding engine with the case of one of its tests."""
    for name, mutant in MUTANTS.items():
        if not getattr(mutant, "module", "shardformer.").startswith("shardformer."):
            continue
        found = next(filter(None, map(_case_of, mutant.tests)), None)
        if found is not None and found.sizes.world_size > found.sizes.dp_size:
            yield name, found


def _case_of(test: str) -> Case | None:
    """Return the case that a test trains; None if it trains none."""
    parts = _ID.fullmatch(test)
    if parts is None:
        return None
    module = importlib.import_module(parts["file"].replace("/", "."))
    marks = getattr(getattr(module, parts["test"]), "pytestmark", ())
    params = [each for mark in marks if mark.name == "parametrize" for each in mark.args[1]]
    given = [param.values[0] if hasattr(param, "marks") else param for param in params]
    return next((case for case in given if isinstance(case, Case) and str(case) == parts["case"]), None)


def verdict(name: str, case: Case) -> dict[str, str]:
    """Put a mutant into this process, and return what the check says of its case."""
    options = {key: value for key, value in case.plugin_options.items() if key not in _LEFT_OUT}
    MUTANTS[name].apply()
    return {"mutant": _text(check_layout(CheckedModel(case.recipe.model()), options, case.sizes.world_size))}


def _text(report: LayoutReport) -> str:
    if report.findings:
        return f"found: {report.findings[0]}"
    return f"no copy trains: {report.not_checked[0]}" if report.not_checked else "exact"


def model_of(name: str, fields: Mapping[str, Any]) -> nn.Module:
    """The model of Family/Class and the fields of its configuration, without values."""
    head = HeadClass(*name.split("/"))
    model_class = getattr(importlib.import_module(head.module), head.name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**fields))


def class_verdicts(name: str) -> dict[str, str]:
    """Layout -> what the check says of the default configuration of Family/Class; or "model" -> why there is none."""
    try:
        model = model_of(name, {})
    except Exception as error:  # any of a thousand classes may fail in its own way
        return {"model": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    found = _verdicts(model)
    if any(_OTHER_PARTS in verdict for verdict in found.values()):  # a part that the small copy has not
        with suppress(Exception):
            found = _verdicts(twin_of(HeadClass(*name.split("/"))).build())
    return found


def _verdicts(model: nn.Module) -> dict[str, str]:
    has_experts = any(".experts." in each for each, _ in model.named_parameters())
    return {
        layout: _text(check_layout(CheckedModel(model), options, 2))
        for layout, options in LAYOUTS.items()
        if layout != "ep2" or has_experts
    }


def mesh_verdict(name: str) -> dict[str, str]:
    """What the check says of a published configuration on a mesh that no machine here has: cells of the page."""
    facts = published()[name]
    model = model_of(facts["class"], facts["config"])
    start = time.process_time()
    report = check_layout(CheckedModel(model), _MESH, _MESH_RANKS)
    seconds, count = time.process_time() - start, sum(param.numel() for param in model.parameters())
    said = "; ".join([f"exact, {len(report.proved)} layouts", *report.findings, *report.not_checked])
    return {"mesh": f"{count / 1e9:.0f} billion | {seconds:.1f} | {said}"}


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, which may change what it likes."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), torch.set_num_threads, (1,)) as process:
        return process.submit(function, *arguments).result()


def _kind(verdict: str) -> str:
    """Return "exact", "found", "refused" where the reason says what would do, or "not tried"."""
    kind = verdict.partition(":")[0]
    if kind != "no copy trains":
        return kind
    return "refused" if "; use " in verdict else "not tried"


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """The page of the documentation."""
    rows, told = [], []
    for layout in LAYOUTS:
        verdicts = {name: each[layout] for name, each in found.items() if layout in each}
        kinds = Counter(_kind(verdict) for verdict in verdicts.values())
        counts = " | ".join(str(kinds[kind]) for kind in ("exact", "refused", "not tried", "found"))
        rows.append(f"| {layout} | {len(verdicts)} | {counts} |")
        verdicts = {name: re.sub(r"of \S*site-packages/", "of ", verdict) for name, verdict in verdicts.items()}
        told += [f"- {name}, {layout}: {verdict}" for name, verdict in verdicts.items() if verdict.startswith("found")]
    mutants = {name: each["mutant"] for name, each in found.items() if "mutant" in each}
    missed = [name for name, verdict in mutants.items() if not verdict.startswith("found")]
    return _PAGE.format(
        mutants=_MUTANTS.format(len(mutants) - len(missed), len(mutants), "; ".join(missed)) if mutants else "",
        no_model=sum("model" in each for each in found.values()),
        rows="\n".join(rows),
        told="\n".join(told) or "No false alarm.",
        meshes="\n".join(f"| {name} | {each['mesh']} |" for name, each in found.items() if "mesh" in each),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mutants", "classes", "meshes", "page"))
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="of the names of mutants, Family/Class, checkpoints"
    )
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each class or mesh, read at first")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long; the same command goes on")
    parser.add_argument("--output", type=Path, help="page to write")
    given = parser.parse_args()
    found: dict[str, dict[str, str]] = dict(read_rows(given.log))
    work: dict[str, tuple[Any, ...]] = {}
    if given.what == "mutants":
        work = {name: (verdict, name, case) for name, case in cases()}
    elif given.what == "classes":
        names = [f"{head.family}/{head.name}" for head in head_classes()]
        work = {name: (class_verdicts, name) for name in names}
    elif given.what == "meshes":
        work = {name: (mesh_verdict, name) for name in LARGEST}
    end = time.monotonic() + 60 * given.minutes
    for name, task in work.items():
        if name in found or not re.search(given.only, name) or time.monotonic() > end:
            continue
        found[name] = alone(*task)
        print(f"{name}: {found[name]}", flush=True)
        add_row(given.log, [name, found[name]])
    if given.output:
        given.output.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
