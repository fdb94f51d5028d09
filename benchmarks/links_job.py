"""What `links.py` runs on every rank: `links_job.py FOLDER QUICK RATE...`; FOLDER is on all machines.

Before it measures at a rate, the job writes `FOLDER/wants-RATE` and waits for `FOLDER/has-RATE`.
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import turns
from benchmarks.links_model import BATCH, CASES, LENGTH, VOCABULARY, build, layouts
from booster import Booster, launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.planner.calibrate import measure_device, measure_links
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.zero.comm.collectives import P2PCollectives, ZeroCollectives
from plugins.hybrid_parallel.zero.comm.hierarchical import HierarchicalCollectives

_CPU = torch.device("cpu")
_NUMBERS = 2**20  # of the buffer that is reduced: 4 MiB
_POLL_S = 0.05


def main() -> None:
    folder, quick, rates = Path(sys.argv[1]), sys.argv[2] == "quick", sys.argv[3:]
    torch.set_num_threads(1)
    launch_from_torch(timeout_s=600)
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    found: dict[str, Any] = {"reductions": {}, "links": {}, "steps": {}}
    for rate in rates:
        _wait_for_rate(folder, rate)
        found["reductions"][rate] = reductions(here, 2 if quick else 5)
        found["links"][rate] = measure_links(_CPU, here)
        found["steps"][rate] = {layout: step_seconds(layout, 2 if quick else 4) for layout in layouts()}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    inside, between = found["links"][rates[-1]]
    found["compute"] = measure_device(_CPU, build, LENGTH, "fp32", CASES, inside, between, here, world_size)
    (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(found))


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
