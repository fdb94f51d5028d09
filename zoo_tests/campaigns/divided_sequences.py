"""Find families whose plans divide sequences right: `enable_sequence_parallelism` for what no policy describes.

    python -m zoo_tests.campaigns.divided_sequences [--only PATTERN] [--log FILE] [--ship]

Each head class whose layers have regions is trained with slices of sequences between them, and plainly. `--ship` adds
the families of which a class is exact, and none is wrong or fails, to the table of the package. The log is that of the
census: what is there under `sp2` is not trained again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from shardformer.policies.plans import tables
from shardformer.policies.plans.declared import DeclaredPlan
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.policies.registry import policy_for
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import plain_run, sharded_verdict
from zoo_tests.campaigns.census.verdict import EXACT, Verdict, append, read_log
from zoo_tests.harness.ranks import stop_pools

_TABLE = Path(tables.__file__).parent / "divided_sequences.json"
_LAYOUT = "sp2"
_NOT_DIVIDED = "does not tell where its tokens meet"


def main() -> int:
    """Train the classes, and write the table if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each class, read at first")
    parser.add_argument("--ship", action="store_true", help="add what is found to the table of the package")
    arguments = parser.parse_args()
    log = read_log(arguments.log) if arguments.log is not None else {}
    found: dict[str, str] = {}
    try:
        for head in head_classes():
            name = f"{head.family}/{head.name}"
            if re.search(arguments.only, name):
                known = log.get(name)
                found[name] = known.layouts[_LAYOUT] if known is not None else _verdict_of(head)
                sys.stdout.write(f"{name}: {found[name]}\n")
                if known is None and arguments.log is not None:
                    append(arguments.log, name, Verdict(plain=EXACT, layouts={_LAYOUT: found[name]}))
    finally:
        stop_pools()
    if arguments.ship:
        before = json.loads(_TABLE.read_text(encoding="utf-8"))
        after = sorted({*before, *families_to_ship(found)})
        _TABLE.write_text(json.dumps(after, indent=0) + "\n", encoding="utf-8")
        sys.stdout.write(f"{len(after) - len(before)} families are new in the table of {len(after)}\n")
    return 0


def families_to_ship(found: dict[str, str]) -> set[str]:
    """The families of which a class is exact, and all others are exact or have no layers that can be divided.

    Args:
        found: Family/Class -> verdict.
    """
    good = {name.partition("/")[0] for name, verdict in found.items() if verdict == EXACT}
    bad = {
        name.partition("/")[0] for name, verdict in found.items() if verdict != EXACT and _NOT_DIVIDED not in verdict
    }
    return good - bad


def _verdict_of(head: HeadClass) -> str:
    """The verdict on a class with slices of sequences, as if its plan said that they may be."""
    plain = plain_run(head)
    policy = None if isinstance(plain, str) else policy_for(plain.case.tiny_model.build())
    if not isinstance(policy, PlanPolicy):
        return _NOT_DIVIDED
    plan = replace(policy.declared or DeclaredPlan(None), splits_sequence=True)
    return sharded_verdict(head, _LAYOUT, plain, custom_policy=PlanPolicy(plan))


if __name__ == "__main__":
    sys.exit(main())
