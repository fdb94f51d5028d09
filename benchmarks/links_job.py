"""What `links.py` runs on every rank: `links_job.py FOLDER QUICK RATE...`; FOLDER is on all machines.

Before it measures at a rate, the job writes `FOLDER/wants-RATE` and waits for `FOLDER/has-RATE`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import turns
from benchmarks.links_model import BATCH, LENGTH, ROWS, VOCABULARY, build, cases, layouts
from booster import Booster, launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.planner.calibrate import measure_device, measure_link, slowest
from plugins.hybrid_parallel.planner.device import Link
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from plugins.hybrid_parallel.zero.collectives.backend import ZeroCollectives
from plugins.hybrid_parallel.zero.collectives.p2p import HierarchicalCollectives, P2PCollectives

_CPU = torch.device("cpu")
_NUMBERS = 2**20  # of the buffer that is reduced: 4 MiB
_POLL_S = 0.05


def main() -> None:
    folder, quick, rates = Path(sys.argv[1]), sys.argv[2] == "quick", sys.argv[3:]
    torch.set_num_threads(1)
    launch_from_torch(timeout_s=600)
    here, rank, world_size = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"reductions": {}, "network": {}, "steps": {}}
    links: dict[str, tuple[Link, Link]] = {}
    for rate in rates:
        _wait_for_rate(folder, rate)
        if here > 1:
            found["reductions"][rate] = reductions(here, 2 if quick else 5)
        links[rate] = measure_links(_CPU, here)
        found["network"][rate] = {"bandwidth": links[rate][1].bandwidth, "latency": links[rate][1].latency}
        found["steps"][rate] = [step_seconds(layout, 2 if quick else 4) for layout in layouts(world_size)]
    dist.barrier()
    dist.destroy_process_group()
    found["predicted"] = predictions(links, here, world_size)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def measure_links(device: torch.device, ranks_per_machine: int) -> tuple[Link, Link]:
    """Measure the links inside machines and between them, in a job whose machines have as many ranks each.

    Collective: all ranks of the job must call this. All pairs of machines are measured at the same time, as many as a
    machine has ranks, since training does so too.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    machines = [list(range(first, first + ranks_per_machine)) for first in range(0, world_size, ranks_per_machine)]
    across = [list(range(place, world_size, ranks_per_machine)) for place in range(ranks_per_machine)]
    found = []
    for partition in (machines, across):
        groups = [dist.new_group(ranks) for ranks in partition]
        own = next(group for group, ranks in zip(groups, partition, strict=True) if rank in ranks)
        found.append(measure_link(device, own))
    return found[0], found[1]


def predictions(links: Mapping[str, tuple[Link, Link]], ranks_per_machine: int, ranks: int) -> dict[str, list[float]]:
    """Return the predicted seconds of a step, by rate and layout, from what this rank measures of the model."""
    first = next(iter(links.values()))
    measured = measure_device(_CPU, build, LENGTH, "fp32", cases(ranks), *first, ranks_per_machine, ranks)
    calibration, model = slowest([measured]), ModelMap(build)
    found = {}
    for rate, (inside, between) in links.items():
        device = replace(calibration.device, inside=inside, between=between)
        predictor = Predictor(model, Profiler(build, LENGTH, device, "fp32", ROWS, calibration.parts))
        found[rate] = [predictor.predict(layout).seconds.total for layout in layouts(ranks)]
    return found


def _wait_for_rate(folder: Path, rate: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / f"wants-{rate}").touch()
    while not (folder / f"has-{rate}").exists():
        time.sleep(_POLL_S)
    dist.barrier()


def reductions(ranks_per_machine: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of a reduce-scatter and an all-gather over all ranks, by way, alternating."""
    group = dist.group.WORLD
    ways: dict[str, ZeroCollectives] = {
        "every rank to every rank": P2PCollectives(group),
        "inside, then across": HierarchicalCollectives(group, ranks_per_machine),
    }
    flat = torch.ones(_NUMBERS)
    shard = torch.empty(_NUMBERS // dist.get_world_size())

    def exchange(way: ZeroCollectives) -> None:
        way.reduce_scatter(flat, shard).wait()
        way.all_gather(flat).wait()
        flat.fill_(1.0)

    return turns({name: (lambda way=way: exchange(way)) for name, way in ways.items()}, repeats)


def step_seconds(layout: Layout, steps: int) -> float:
    """Return the median seconds of a training step."""
    torch.manual_seed(0)
    model = build()
    plugin = HybridParallelPlugin(**layout.options())
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))
    times = []
    for _ in range(1 + steps):
        ids = torch.randint(VOCABULARY, (BATCH // plugin.dp_size, LENGTH))
        dist.barrier()
        began = time.perf_counter()
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
