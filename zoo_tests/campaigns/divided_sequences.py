"""Find families whose plans divide sequences right: `enable_sequence_parallelism` and `cp_size` without a policy.

    python -m zoo_tests.campaigns.divided_sequences [--ways split_gather,cp,all_to_all,cp_all_to_all] [--only PATTERN]
        [--log FILE] [--ship]

Each head class whose layers have regions, or attention alone, is trained with parts of sequences, and plainly; under
all but `split_gather`, one with towers of images gets images. `--ship` adds to the table of the package the families of
which a class is exact, and none is wrong or fails; where a class with towers got no images, the exact classes. The log
is that of the census: what is there under a way's layout is not trained again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.verify.image_twin import NoMediaError
from plugins.hybrid_parallel.verify.train import train_reference
from shardformer.policies import families
from shardformer.policies.plans.policy import PlanPolicy, attention_outside
from shardformer.policies.registry import policy_for
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import PlainRun, plain_run, sharded_verdict
from zoo_tests.campaigns.census.verdict import EXACT, Verdict, append, read_log
from zoo_tests.harness.ranks import stop_pools
from zoo_tests.harness.sound_twin import media_twin_of
from zoo_tests.harness.trusted_policy import TRUSTED

_TABLE = Path(families.__file__).parent / "divided_sequences.json"
_LAYOUTS = {"split_gather": "sp2", "cp": "cp2", "all_to_all": "sp2-ulysses", "cp_all_to_all": "cp2-ulysses"}
_REFUSALS = ("does not tell where its tokens meet", "cannot share the sequences", ConfigurationError.__name__)
_NOT_TRIED = "it has towers, and no batch for them was made"


def main() -> int:
    """Train the classes, and write the table if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(_LAYOUTS), help=f"of {', '.join(_LAYOUTS)}")
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each class, read at first")
    parser.add_argument("--ship", action="store_true", help="add what is found to the table of the package")
    arguments = parser.parse_args()
    log = read_log(arguments.log) if arguments.log is not None else {}
    ways = arguments.ways.split(",")
    found: dict[str, dict[str, str]] = {way: {} for way in ways}
    try:
        for way, head in product(ways, head_classes()):
            name, layout = f"{head.family}/{head.name}", _LAYOUTS[way]
            if re.search(arguments.only, name):
                known = log.get(name, Verdict(EXACT))
                if layout not in known.layouts:
                    known.layouts[layout] = _verdict_of(head, way)
                    log[name] = known
                    if arguments.log is not None:
                        append(arguments.log, name, known)
                found[way][name] = known.layouts[layout]
                sys.stdout.write(f"{way}: {name}: {found[way][name]}\n")
    finally:
        stop_pools()
    if arguments.ship:
        table = json.loads(_TABLE.read_text(encoding="utf-8"))
        table |= {way: merged(table[way], families_to_ship(found[way])) for way in ways}
        _TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(", ".join(f"{way}: {len(names)} families and classes" for way, names in table.items()) + "\n")
    return 0


def families_to_ship(found: dict[str, str]) -> set[str]:
    """The families of which a class is exact, and all others are exact or have no layers that can be divided.

    Of a family with a class that was not tried, the exact ones are returned alone, as Family/Class.

    Args:
        found: Family/Class -> verdict.
    """
    shipped = set()
    for family in {name.partition("/")[0] for name in found}:
        verdicts = {name: verdict for name, verdict in found.items() if name.partition("/")[0] == family}
        exact = {name for name, verdict in verdicts.items() if verdict == EXACT}
        others = [verdict for name, verdict in verdicts.items() if name not in exact]
        if all(verdict == _NOT_TRIED or any(each in verdict for each in _REFUSALS) for verdict in others):
            shipped |= exact if _NOT_TRIED in others else {family} if exact else set()
    return shipped


def merged(known: Iterable[str], new: Iterable[str]) -> list[str]:
    """Families and classes in order, without the classes of families that are there as a whole."""
    names = {*known, *new}
    return sorted(name for name in names if name == (family := name.partition("/")[0]) or family not in names)


def _verdict_of(head: HeadClass, way: str) -> str:
    """The verdict on a class with parts of sequences, as if its plan said that there may be some."""
    layout = _LAYOUTS[way]
    plain = plain_run(head)
    policy = None if isinstance(plain, str) else policy_for(plain.case.tiny_model.build())
    if not isinstance(policy, PlanPolicy):
        return _REFUSALS[0]
    if layout != _LAYOUTS["split_gather"]:
        plain = plain_run_with_images(plain, policy)
    if plain is None:
        return _NOT_TRIED
    try:
        return sharded_verdict(head, layout, plain, custom_policy=TRUSTED[way](policy.declared))
    except ConfigurationError as error:  # a plan with a function of its own cannot be sent to ranks
        return str(error).splitlines()[0]


def has_towers(model: nn.Module, lists: Iterable[str]) -> bool:
    """Whether a model has other inputs than texts, or attends outside of its lists of layers."""
    layers = [layer for path in lists for layer in model.get_submodule(path)]
    reads_more = any(hasattr(model.config, name) for name in ("vision_config", "audio_config"))
    return reads_more or bool(attention_outside(model, layers))


def plain_run_with_images(plain: PlainRun, policy: PlanPolicy) -> PlainRun | None:
    """Plain training with images or sounds, if the model has towers; None if no batch for them was made."""
    model = plain.case.tiny_model.build()
    policy.set_model(model)
    if policy.stages is None or not has_towers(model, [layout.layers for layout in policy.stages.chain]):
        return plain
    try:
        case = replace(plain.case, tiny_model=media_twin_of(plain.case.tiny_model))
    except NoMediaError as error:
        sys.stdout.write(f"{type(model).__name__}: {error}\n")
        return None
    return PlainRun(case, train_reference(case))


if __name__ == "__main__":
    sys.exit(main())
