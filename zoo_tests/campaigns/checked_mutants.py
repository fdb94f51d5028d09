"""Which mutants of the sharding engine the layout check finds, without ranks.

    python -m zoo_tests.campaigns.checked_mutants [--only REGEX]

Each mutant whose tests train a case of the zoo is put into a process of its own, where the layout check gets the model
and the layout of that case. Found: it has a finding, or no copy trains. The command prints one line for each mutant and
their number; a mutant that needs several steps, or a criterion, is not one of sharding and is left out.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout
from zoo_tests.campaigns.mutations.mutants import MUTANTS
from zoo_tests.harness.case import Case

_ID = re.compile(r"(?P<file>[\w/]+)\.py::(?P<test>\w+)\[(?P<case>.+)\]")
_ALONE = "no copy trains: "
# Options of a case that the check leaves to the tests: kernels, precision, files.
_LEFT_OUT = ("seed", "max_norm", "initial_scale", "zero_bucket_size_in_mb")


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


def verdict(name: str, case: Case) -> str:
    """Put a mutant into this process, and return what the check says of its case."""
    torch.set_num_threads(1)
    options = {key: value for key, value in case.plugin_options.items() if key not in _LEFT_OUT}
    MUTANTS[name].apply()
    report = check_layout(CheckedModel(case.recipe.model()), options, case.sizes.world_size)
    if report.findings:
        return f"found: {report.findings[0]}"
    return f"{_ALONE}{report.not_checked[0]}" if report.not_checked else "not found"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="of the names of the mutants")
    only = parser.parse_args().only
    chosen = [(name, case) for name, case in cases() if re.search(only, name)]
    context, found = multiprocessing.get_context("fork"), 0
    for name, case in chosen:
        with ProcessPoolExecutor(1, context) as process:
            said = process.submit(verdict, name, case).result()
        found += said.startswith("found")
        print(f"{name} ({case}): {said}", flush=True)
    print(f"{found} of {len(chosen)} mutants found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
