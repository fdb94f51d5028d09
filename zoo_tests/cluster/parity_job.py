"""Training under several layouts in one job on several machines: `parity_job.py FOLDER NAME...`.

Each rank leaves in FOLDER what it saw under every layout, and which machines its groups are on.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from booster import launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.train_sharded import RankReport, train_sharded

_AXES = ("pp", "dp", "cp", "tp")
_RECIPE = Recipe(family="llama", head="causal_lm", optimizer="adamw", rows=8)
CASES = {
    **{name: Case(recipe=_RECIPE, layout=name) for name in ("tp2dp2", "tp2pp2", "dp4", "pp4", "cp2dp2", "tp4")},
    "dp4 zero3": Case(recipe=_RECIPE, layout="dp4", zero_stage=3),
}
CASES = {name: case.shallow() for name, case in CASES.items()}


def main() -> None:
    torch.set_num_threads(1)
    launch_from_torch(timeout_s=120)
    train(Path(sys.argv[1]), sys.argv[2:])


def train(folder: Path, names: Sequence[str]) -> None:
    """Train under the layouts of these names, one after another."""
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        dist.barrier()
        report = train_sharded(CASES[name], folder / name)
        found = {"report": asdict(report), "machines": machines_of_axes(CASES[name])}
        (folder / name / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


def machines_of_axes(case: Case) -> dict[str, list[str]]:
    """Return, for each axis, the machines of the ranks that this rank shares it with."""
    mesh = HybridParallelPlugin(**case.plugin_options).mesh
    found = {}
    for axis in _AXES:
        names: list[str] = [""] * mesh.size(_AXES.index(axis))
        dist.all_gather_object(names, socket.gethostname(), group=mesh.get_group(axis))
        found[axis] = sorted(set(names))
    return found


def reports_of(folder: Path, name: str) -> tuple[list[RankReport], list[dict[str, list[str]]]]:
    """Return what the ranks have left of one layout."""
    found = [
        json.loads((folder / name / f"rank-{rank}.json").read_text()) for rank in range(CASES[name].sizes.world_size)
    ]
    return [RankReport(**each["report"]) for each in found], [each["machines"] for each in found]


if __name__ == "__main__":
    main()
