"""Configurations of published checkpoints: exact, or refused in a sentence, under five layouts, and ep2 for experts.

    python -m zoo_tests.campaigns.published [--eight] [--only REGEX] [--log FILE] [--minutes N]
        [--output docs/results/published.md]

`published.json` has what a person finds in the `config.json` of a checkpoint, as far as it differs from the defaults of
its class. A twin has the sizes divided, and all else as published: flags, lists, ratios, kinds of layers, tables of
rotary embeddings; windows and thresholds are brought inside of it. Norms and biases are drawn. The loss and every
gradient are compared with plain training in fp64, with images where the model takes them. `--eight` trains under three
axes on eight ranks, and writes that section of the page alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from plugins.hybrid_parallel.verify.image_twin import NoMediaError, image_twin_of
from plugins.hybrid_parallel.verify.random_batch import distance_from_wave
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from plugins.hybrid_parallel.verify.train import Criterion, RandomLossError, VerifyCase, train_reference
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import PlainRun, sharded_verdict
from zoo_tests.campaigns.census.verdict import EXACT, add_row, kind_of, read_rows, reasons
from zoo_tests.harness.ranks import stop_pools

LAYOUTS: Mapping[str, Mapping[str, Any]] = {"tp2": {}, "pp2": {}, "sp2": {}, "cp2": {}, "dp2": {"zero_stage": 3}}
_EIGHT = ("tp2pp2dp2", "tp4pp2", "pp4dp2", "cp2tp2pp2")
_EXPERTS, _EIGHT_EXPERTS = "ep2", "ep2pp2dp4"
_ROWS, _EIGHT_ROWS, _UNIT = 6, 11, 8
_FACTS = Path(__file__).with_suffix(".json")
_FEED_FORWARD = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "d_ff")
_HIDDEN = ("hidden_size", "d_model")
_HEAD = """# Published checkpoints

Written by `python -m zoo_tests.campaigns.published --output docs/results/published.md`; do not edit.

The configurations of {count} published checkpoints, with divided sizes and all else as published: flags, ratios of
heads and of feed-forwards, lists of layers, kinds of rotary embeddings, soft caps, norms, biases, activations. At most
8 experts are left, and the factors of long rotary embeddings are made up. One step is trained plainly and on two ranks,
in fp64 where the class can, with images where it takes them; the loss and every gradient are compared. dp2 is with
ZeRO-3, sp2 is tp2 with sequence parallelism. Weights are drawn, not loaded. Batch norms take the statistics of a
replica's rows, as in DDP: under dp2 the plain run of ResNet does so too. A class without a loss has a criterion.

"""
_SECTION = "\n## On eight ranks\n"
_EIGHT_HEAD = """
Written by the same command with `--eight`: two micro-batches or as many as there are stages, replicas and micro-batches
of unequal rows, and stage 1, 2 or 3 of ZeRO, drawn by the name of the checkpoint and the layout. ep2 is over two of the
four replicas of each of two stages. {exact} of {count} are exact, and {refused} are refused in a sentence.

"""


def published() -> dict[str, dict[str, Any]]:
    """Name of a checkpoint -> family/class, fields of its configuration, and those of the twin that the rest needs."""
    return json.loads(_FACTS.read_text(encoding="utf-8"))


def plain_of(facts: Mapping[str, Any], tp_size: int = 2, rows: int = _ROWS) -> tuple[HeadClass, PlainRun]:
    """Plain training of the twin of a checkpoint, whose heads so many ranks divide if they do those of the whole."""
    head = HeadClass(*facts["class"].split("/"))
    config_class = getattr(importlib.import_module(head.module), head.name).config_class
    own = config_class(**facts["config"])
    config = small_config(own, TwinSizes.of(own, tp_size, 2))
    _keep_ratios(own, config)
    for path, value in facts.get("twin", {}).items():
        *owners, name = path.split(".")
        setattr(reduce(getattr, owners, config), name, value)
    config = config_class(**config.to_dict())  # checks it
    config.use_cache = False
    twin = TinyModel(head.module, head.name, config, torch.float64, None)
    if hasattr(config, "vision_config"):
        try:
            twin = image_twin_of(twin)
        except NoMediaError as error:
            print(f"{head.name}: {error}", file=sys.stderr)
    criterion = None
    if facts.get("has_loss") is False:
        twin, criterion = replace(twin, has_labels=False), distance_from_wave
    try:
        return head, _trained(twin, rows, criterion)
    except Exception:  # a class that computes in fp32
        return head, _trained(replace(twin, dtype=torch.float32), rows, criterion)


def _trained(twin: TinyModel, rows: int, criterion: Criterion | None) -> PlainRun:
    case = VerifyCase(twin, rows, 1, {}, criterion)
    try:
        trace = train_reference(case)
    except RandomLossError:
        case = replace(case, draws_alike=True)
        trace = train_reference(case)
    return PlainRun(case, trace, "" if criterion is None else "it has no loss")


def _keep_ratios(own: Any, small: Any) -> None:
    """Give feed-forwards their width in hidden sizes, in units of 8 features, also in parts of a configuration."""
    hidden = next((name for name in _HIDDEN if isinstance(getattr(own, name, None), int)), None)
    for name, value in list(vars(small).items()):
        if hasattr(value, "to_dict"):
            _keep_ratios(getattr(own, name), value)
        elif name in _FEED_FORWARD and hidden is not None and isinstance(getattr(own, name), int):
            times = getattr(own, name) / getattr(own, hidden)
            setattr(small, name, max(round(times * getattr(small, hidden) / _UNIT), 1) * _UNIT)


def judge(facts: Mapping[str, Any], layouts: Mapping[str, Mapping[str, Any]] = LAYOUTS) -> dict[str, str]:
    """Layout -> "exact", or the reason; or "plain" -> why plain training fails."""
    return _judge(facts, layouts, {_EXPERTS: {}}, 2, _ROWS)


def judge_on_eight(name: str) -> dict[str, str]:
    """The verdicts on a checkpoint on eight ranks, as those of `judge`."""
    layouts: dict[str, dict[str, Any]] = {
        layout: {"zero_stage": random.Random(f"{name}/{layout}").choice([1, 2, 3])}
        for layout in (*_EIGHT, _EIGHT_EXPERTS)
    }
    experts = {_EIGHT_EXPERTS: layouts.pop(_EIGHT_EXPERTS)}
    return _judge(published()[name], layouts, experts, 4, _EIGHT_ROWS)


def _judge(facts: Mapping[str, Any], layouts: Any, of_experts: Any, tp_size: int, rows: int) -> dict[str, str]:
    try:
        head, plain = plain_of(facts, tp_size, rows)
    except Exception as error:  # a configuration that this release does not take
        return {"plain": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    has_experts = any(".experts." in name for name, _ in plain.case.tiny_model.build().named_parameters())
    wanted = {**layouts, **(of_experts if has_experts else {})}
    return {layout: sharded_verdict(head, layout, plain, **options) for layout, options in wanted.items()}


def sweep(
    only: str, known: Mapping[str, Any], until: float, on_eight: bool = False
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the verdicts on checkpoints that are not known."""
    for name, facts in published().items():
        if name not in known and re.search(only, f"{name} {facts['class']}") and time.monotonic() < until:
            yield name, judge_on_eight(name) if on_eight else judge(facts)


def page(found: Mapping[str, Mapping[str, str]], of_eight: str) -> str:
    """The page of the documentation, with a section on eight ranks."""
    facts = published()
    left = ", ".join(name for name in facts if name not in found)
    untried = f"\nIn `published.json`, and not trained yet: {left}.\n" if left else ""
    table, why = _table(found, (*LAYOUTS, _EXPERTS))
    return _HEAD.format(count=len(found)) + f"{table}\n{untried}\n## What is not exact\n\n{why}\n" + of_eight


def section(found: Mapping[str, Mapping[str, str]]) -> str:
    """The section of the page on eight ranks."""
    kinds = [kind_of(verdict) for verdicts in found.values() for verdict in verdicts.values()]
    head = _EIGHT_HEAD.format(exact=kinds.count(EXACT), count=len(kinds), refused=kinds.count("refused"))
    table, why = _table(found, (*_EIGHT, _EIGHT_EXPERTS))
    return f"{_SECTION}{head}{table}\n\n{why}\n"


def _table(found: Mapping[str, Mapping[str, str]], layouts: Sequence[str]) -> tuple[str, str]:
    """A row for each checkpoint, and the reasons of what is not exact."""
    classes = {name: each["class"].partition("/")[2] for name, each in published().items() if name in found}
    rows = ["| Checkpoint | Class | " + " | ".join(layouts) + " |", "|---" * (len(layouts) + 2) + "|"]
    for name in sorted(classes, key=str.lower):
        cells = [kind_of(found[name][layout]) if layout in found[name] else "" for layout in layouts]
        rows.append(f"| {name} | `{classes[name]}` | {' | '.join(cells)} |")
    counts = [[kind_of(each[layout]) for each in found.values() if layout in each] for layout in layouts]
    exact = " | ".join(f"{kinds.count(EXACT)} of {len(kinds)}" for kinds in counts)
    rows.append(f"| exact | | {exact} |")
    # several checkpoints have one class
    return "\n".join(rows), reasons({f"{name}/{each}": found[name] for name, each in classes.items()})


def main() -> int:
    """Train; return 1 if a checkpoint is neither exact nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eight", action="store_true", help="three axes on eight ranks; the log is of these alone")
    parser.add_argument("--only", default="", help="regular expression on names and Family/Class")
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each checkpoint, read at first")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long; the same command goes on")
    parser.add_argument("--output", type=Path, help="page to write")
    given = parser.parse_args()
    found: dict[str, dict[str, str]] = dict(read_rows(given.log))
    try:
        for name, verdicts in sweep(given.only, found, time.monotonic() + 60 * given.minutes, given.eight):
            found[name] = verdicts
            add_row(given.log, [name, verdicts])
            print(f"{name}: {verdicts}", flush=True)
    finally:
        stop_pools()
    if given.output:
        text = given.output.read_text(encoding="utf-8") if given.output.exists() else ""
        of_two, mark, of_eight = text.partition(_SECTION)
        written = of_two + section(found) if given.eight else page(found, mark + of_eight)
        given.output.write_text(written, encoding="utf-8")
    kinds = {kind_of(each) for verdicts in found.values() for each in verdicts.values()}
    return int(not kinds <= {EXACT, "refused"})


if __name__ == "__main__":
    # Ranks import the classes of their task by the name of this module.
    sys.exit(importlib.import_module("zoo_tests.campaigns.published").main())
