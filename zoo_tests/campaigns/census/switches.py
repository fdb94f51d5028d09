"""`python -m zoo_tests.campaigns.census.switches`: train families with the switches of their configurations turned.

    python -m zoo_tests.campaigns.census.switches [--only PATTERN] [--every N] [--layouts tp2] [--jobs 1] [--limit S]

The census trains default configurations; real ones turn switches, as norms of queries and keys, or biases.
One class of each family trains with all boolean fields of the architecture turned at once. Where that differs from
plain training, does not run, or does not train plainly, each field is turned alone, and what it does is printed.
"""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.jobs import judged
from zoo_tests.campaigns.census.trained import twin_of

# Fields that say what is returned, kept or read from files, or which kernels run.
_NO_SWITCH = re.compile(
    r"^_|^(output_|return_|use_cache|is_encoder|is_decoder|add_cross_attention|tie_|disable_|use_.*_kernels|freeze_|"
    r"has_relative|quant_mode|use_dummy|use_streaming|convert_sync|is_folding|is_hybrid|is_vqa|reduce_loss|"
    r"use_pretrained|use_timm|features_only|use_weighted)"
)
_KINDS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "ForImageClassification")


def switches_of(config: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (dotted path, turned value) of the boolean fields of a configuration, and of those inside it."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            yield from switches_of(value, f"{prefix}{name}.")
        elif isinstance(value, bool) and not _NO_SWITCH.match(name):
            yield f"{prefix}{name}", not value


def one_of_each_family() -> list[HeadClass]:
    """A class of each family: of the kind that most families have."""
    families = (list(heads) for _, heads in groupby(head_classes(), key=lambda head: head.family))
    return [
        next((head for kind in _KINDS for head in heads if head.name.endswith(kind)), heads[0]) for heads in families
    ]


def turned(head: HeadClass) -> tuple[tuple[str, bool], ...]:
    """All switches of a class, turned; none if its configuration cannot be built."""
    try:
        return tuple(switches_of(twin_of(head).config))
    except Exception:  # any of a thousand classes may fail in its own way
        return ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample of one family in N")
    parser.add_argument("--layouts", default="tp2")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time, each with its own ranks")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a class")
    arguments = parser.parse_args()
    layouts = arguments.layouts.split(",")

    def told(heads: list[HeadClass]) -> Iterator[HeadClass]:
        """Judge the classes, print the verdicts, and yield those that are not exact."""
        for head, verdict in judged([(head, layouts, None) for head in heads], arguments.jobs, arguments.limit):
            switches = " ".join(f"{name}={value}" for name, value in head.switches)
            sys.stdout.write(f"{head.family}/{head.name} {verdict} [{switches}]\n")
            sys.stdout.flush()
            if not all(verdict.exact_under(layout) for layout in layouts):
                yield head

    chosen = [head for head in one_of_each_family() if re.search(arguments.only, f"{head.family}/{head.name}")]
    chosen = [head for head in chosen if zlib.crc32(head.family.encode()) % arguments.every == 0]
    together = [replace(head, switches=turned(head)) for head in chosen]
    failed = list(told([head for head in together if head.switches]))
    alone = [replace(head, switches=(switch,)) for head in failed if len(head.switches) > 1 for switch in head.switches]
    wrong = [*(head for head in failed if len(head.switches) == 1), *told(alone)]
    sys.stdout.write(f"{len(together)} families, {len(failed)} not exact together; {len(wrong)} switches alone\n")


if __name__ == "__main__":
    main()
