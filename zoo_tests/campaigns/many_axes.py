"""Train with many axes at once, and plainly, and compare every loss, gradient norm, gradient and weight.

    python -m zoo_tests.campaigns.many_axes [--axes 3,4,5,6] [--seeds 2] [--only PATTERN] [--log FILE]
        [--output docs/results/many_axes.md]

Each set of the axes tp, pp, cp, ep, dp and sp is trained on up to 16 ranks, every axis of size 2, with an option of
each kind drawn at random: ZeRO stage, schedule, precision, optimizer, and how sequences are divided. What is in the log
is not trained again.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from pathlib import Path

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES
from zoo_tests.campaigns.census.verdict import add_row, read_rows
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import RankError, stop_pools
from zoo_tests.zoo import FAMILIES

AXES = ("tp", "pp", "cp", "ep", "dp", "sp")
_DENSE, _MIXTURES = ("llama", "gpt2", "bert", "mistral"), ("mixtral", "qwen3_moe")
_PRECISIONS = ("fp64", "fp64", "fp32", "bf16", "fp16")  # of experts the first three: in 16 bit, routers choose others
_HEAD = """# Many axes at once

Written by `python -m zoo_tests.campaigns.many_axes --seeds {seeds} --output docs/results/many_axes.md`; do not edit.

Every set of three or more of the axes tp, pp, cp, ep, dp and sp, each of size 2, with options drawn at random. Each
case is trained for two steps and compared with plain training: losses, gradient norms, every gradient and every weight.
sp divides sequences over the ranks of tp; experts are divided over those of dp and cp.

{count} cases of {layouts} sets on up to {ranks} ranks: {exact} exact, {refused} refused, {wrong} other.

| axes | ranks | case | verdict |
|---|---|---|---|
"""


def sets_of_axes(sizes: Iterable[int]) -> list[tuple[str, ...]]:
    """All sets of so many axes."""
    return [axes for size in sizes for axes in combinations(AXES, size)]


def case_of(axes: Collection[str], seed: int = 0) -> Case:
    """A training with these axes; the other options are drawn by the seed, with which 0 stands for fp64.

    sp adds tp, whose ranks it uses; ep uses the ranks of dp and cp, and adds dp if there are none.
    """
    numbers = random.Random(f"{seed}/{' '.join(axes)}")
    held = {*axes, *(["tp"] if "sp" in axes else []), *(["dp"] if "ep" in axes and "cp" not in axes else [])}
    layout = "".join(f"{axis}2" for axis in ("tp", "pp", "cp", "dp") if axis in held)
    family = numbers.choice(_MIXTURES if "ep" in axes else _DENSE)
    precision = numbers.choice(_PRECISIONS[:3] if "ep" in axes else _PRECISIONS) if seed else "fp64"
    options = {"num_microbatches": numbers.choice([2, 3, 4])}
    if "ep" in axes:
        options["ep_size"] = numbers.choice([2, 4]) if {"cp", "dp"} <= held else 2
    if "pp" in axes:
        options["pp_style"] = numbers.choice(sorted(SCHEDULES))
    options |= _divided_sequences(numbers, axes)
    if numbers.random() < 0.3:
        options["gradient_checkpointing"] = "full"
    recipe = Recipe(
        family=family,
        head=FAMILIES[family].main_head,
        precision=precision,
        # AdamW makes whole steps of the rounding of gradients that are almost zero.
        optimizer=numbers.choice(["momentum", "adamw"] if precision == "fp64" else ["sgd", "momentum"]),
        max_norm=0.05,
        rows=numbers.choice([17, 19]),  # of which replicas and micro-batches get different numbers
        config=(("experts_implementation", "eager"),) if "ep" in axes and precision == "fp64" else (),
    )
    return Case(recipe=recipe, layout=layout, zero_stage=numbers.choice([0, 1, 2, 3]), options=tuple(options.items()))


def _divided_sequences(numbers: random.Random, axes: Collection[str]) -> dict[str, object]:
    mode = numbers.choice(["ring_attn", "all_to_all"])
    if "sp" in axes:
        is_gathered = "cp" in axes or mode == "ring_attn"
        mode = "split_gather" if is_gathered else mode
        return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
    return {"sequence_parallelism_mode": mode} if "cp" in axes else {}


def verdict_of(case: Case) -> str:
    """ "exact", the sentence of a refusal, or the first lines of what is wrong."""
    with tempfile.TemporaryDirectory(prefix="many-axes-") as folder:
        try:
            check_case(case, Path(folder))
        except RankError as error:
            refusal = re.search(rf"{ConfigurationError.__name__}: (.*)", str(error))
            return f"refused: {refusal.group(1)}" if refusal else " ".join(str(error).split())[-300:]
        except AssertionError as error:
            return " ".join(str(error).split())[:300]
    return "exact"


def page(verdicts: Mapping[tuple[tuple[str, ...], int], str], seeds: int) -> str:
    """The page of the documentation; verdicts: (axes, seed) -> verdict."""
    cases = {key: case_of(*key) for key in verdicts}
    exact = sum(verdict == "exact" for verdict in verdicts.values())
    refused = sum(verdict.startswith("refused") for verdict in verdicts.values())
    head = _HEAD.format(
        seeds=seeds,
        count=len(verdicts),
        layouts=len({axes for axes, _ in verdicts}),
        ranks=max(case.sizes.world_size for case in cases.values()),
        exact=exact,
        refused=refused,
        wrong=len(verdicts) - exact - refused,
    )
    rows = [
        f"| {'·'.join(key[0])} | {case.sizes.world_size} | {case} | {verdicts[key].replace('|', '/')} |"
        for key, case in cases.items()
    ]
    return head + "\n".join(rows) + "\n"


def main() -> int:
    """Train; return 1 if a case is neither exact nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default="3,4,5,6", help="how many axes at once")
    parser.add_argument("--seeds", type=int, default=2, help="cases of each set; the first is in fp64")
    parser.add_argument("--only", default="", help="regular expression on the axes, as in tp·pp·cp")
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each case, read at first")
    parser.add_argument("--output", type=Path, help="page to write")
    given = parser.parse_args()
    verdicts = {(tuple(axes), seed): verdict for axes, seed, verdict in read_rows(given.log)}
    try:
        for axes in sets_of_axes(map(int, given.axes.split(","))):
            for seed in range(given.seeds) if re.search(given.only, "·".join(axes)) else ():
                if (axes, seed) not in verdicts:
                    verdicts[axes, seed] = verdict_of(case_of(axes, seed))
                    print(f"{'·'.join(axes)} {case_of(axes, seed)}: {verdicts[axes, seed]}", flush=True)
                    add_row(given.log, [axes, seed, verdicts[axes, seed]])
    finally:
        stop_pools()
    if given.output:
        given.output.write_text(page(verdicts, given.seeds), encoding="utf-8")
    return int(any(verdict != "exact" and not verdict.startswith("refused") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
