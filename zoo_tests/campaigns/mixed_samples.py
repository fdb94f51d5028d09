"""Which head classes mix the samples of a batch: what they return for one depends on the others.

    python -m zoo_tests.campaigns.mixed_samples [--only REGEX] [--switches]

Two batches of a tiny model have the same first sample, and the others in another order. Where outputs of the first one
differ, the numbers of a batch that is cut into micro-batches or replicas are not those of the whole batch: `boost` has
to say so. No ranks are needed. The command prints such classes, and returns 1 if `boost` says nothing of one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.setup.input_checks import has_batch_norms, mixed_samples
from plugins.hybrid_parallel.verify.tiny_model import TinyModel
from zoo_tests.campaigns.census.classes import head_classes
from zoo_tests.campaigns.census.trained import twin_of
from zoo_tests.campaigns.switches import source_of, switches_of

_ROWS, _TOLERANCE = 6, 1e-5  # fp32, of the largest output: kernels of experts know no fp64


def mixes_samples(twin: TinyModel) -> bool:
    """Whether outputs for the first sample of a batch depend on the others, not counting numbers that are drawn."""
    model = twin.build()
    batch = twin.batch(model, 0, _ROWS)
    own, drawn = (_outputs_of(0, model, batch, seed) for seed in (0, 1))
    others = [_outputs_of(0, model, _in_order(batch, [0] + [1] * (_ROWS - 1)), 0)]
    if all(_is_by_row(each) for each in batch.values()):  # patches of images stay in their place
        others.append(_outputs_of(_ROWS - 1, model, _in_order(batch, [1] * (_ROWS - 1) + [0]), 0))
    return any(
        _differ(a, b) and not _differ(a, c) for other in others for a, b, c in zip(own, other, drawn, strict=True)
    )


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.allclose(one, other, rtol=0, atol=_TOLERANCE * one.abs().max().item())


def _is_by_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == _ROWS


def _in_order(batch: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    return {name: value[rows] if _is_by_row(value) else value for name, value in batch.items()}


def _outputs_of(row: int, model: nn.Module, batch: Mapping[str, Any], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        found = model(**batch)
    values = found.values() if isinstance(found, Mapping) else found
    return [each[row].double() for each in values if _is_by_row(each) and each.is_floating_point()]


def says_so(model: nn.Module) -> bool:
    """Whether `boost` refuses the model where its batch is cut, or logs that it has batch norms."""
    return mixed_samples(model) is not None or has_batch_norms(model)


def twins(pattern: str, has_switches: bool) -> Iterator[tuple[str, TinyModel]]:
    """Yield name and tiny model of each class, or of one class of each family with each switch of its configuration."""
    families: set[str] = set()
    for head in head_classes():
        if not re.search(pattern, f"{head.family}/{head.name}") or (has_switches and head.family in families):
            continue
        try:
            twin = twin_of(head)
        except Exception:  # any of a thousand classes may fail in its own way
            continue
        families.add(head.family)
        if not has_switches:
            yield f"{head.family}/{head.name}", twin
        for switch in switches_of(twin.config, source_of(head)) if has_switches else ():
            with suppress(Exception):  # a configuration that the class does not take
                yield f"{head.family}/{head.name} {switch}", replace(twin, config=switch.applied_to(twin.config))


def main() -> int:
    """Check the classes; return 1 if one mixes samples and `boost` says nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--switches", action="store_true", help="one class of each family, with each switch of it")
    given = parser.parse_args()
    counts = {"apart": 0, "mixed, told": 0, "mixed, not told": 0, "does not run": 0}
    for name, twin in twins(given.only, given.switches):
        reason = ""
        try:
            kind = "apart" if not mixes_samples(twin) else "mixed, told" if says_so(twin.build()) else "mixed, not told"
        except Exception as error:  # any of a thousand classes may fail in its own way
            kind, reason = "does not run", " ".join(f" ({type(error).__name__}: {error})".split())[:120]
        counts[kind] += 1
        if kind != "apart":
            sys.stdout.write(f"{name}: {kind} {reason}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{counts}\n")
    return int(counts["mixed, not told"] > 0)


if __name__ == "__main__":
    sys.exit(main())
