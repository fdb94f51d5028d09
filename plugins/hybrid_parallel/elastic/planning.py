"""`python -m plugins.hybrid_parallel.elastic.planning REQUEST RESULT`: plan for several numbers of ranks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.planner.device import PRESETS, Device, Link
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.plan import Job, Plan, plan_for

# Of a core with gloo over the loopback device: only ratios matter, and links that are slow next to the passes.
_CPU = Device(
    name="this-machine",
    memory=8e9,
    flops={"bf16": 5e10, "fp16": 5e10, "fp32": 5e10},
    matmul_efficiency=0.6,
    bandwidth=8e9,
    inside=Link(1e-4, 1e9),
    between=Link(3e-4, 1e8),
    operator=1e-5,
    overlap=0.0,
)


def main() -> None:
    """Arguments: file of the request, file for the result; see `layouts.py`."""
    source, target = map(Path, sys.argv[1:])
    threading.Thread(target=_end_with_job, args=(source,), daemon=True).start()
    found = plans(json.loads(source.read_text()))
    hidden = target.with_name(f".{target.name}")
    hidden.write_text(json.dumps(found))
    os.replace(hidden, target)


def _end_with_job(request: Path) -> None:
    """End this process once the job has removed its request."""
    while request.exists():
        time.sleep(1.0)
    os._exit(1)


def plans(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return number of ranks -> sizes of the best layout that fits, or the reason why none does, and the seconds."""
    build, device = _builder(request), _device(request)
    found = {}
    for count in request["counts"]:
        began = time.perf_counter()
        plan = _plan(request, build, device, count)
        found[str(count)] = {**plan, "seconds": round(time.perf_counter() - began, 3)}
    return found


def _builder(request: dict[str, Any]) -> Callable[[], nn.Module]:
    import transformers

    model_class = getattr(transformers, request["model"])
    config = model_class.config_class.from_dict(request["config"])
    return lambda: model_class(config)


def _device(request: dict[str, Any]) -> Device:
    name = request["device"]
    known = next((each for key, each in PRESETS.items() if name and key.lower() in name.lower()), PRESETS["H100"])
    device = _CPU if name is None else known
    return replace(device, memory=request["memory"], node_size=request["node_size"])


def _plan(request: dict[str, Any], build: Callable[[], nn.Module], device: Device, count: int) -> dict[str, Any]:
    job = Job(
        count,
        request["global_batch"],
        request["length"],
        request["precision"],
        largest_cp=request["largest_cp"],
        styles=((request["pp_style"], request["num_chunks"]),),
        zero_stages=(request["zero_stage"],),
    )
    try:
        found = plan_for(build, job, device)[0]
    except ConfigurationError as error:
        return {"reason": str(error)}
    if not found.ranked:
        reasons = [each.reason for each in found.rejected]
        return {"reason": reasons[0] if reasons else f"no layout has {count} ranks"}
    best = _preferred(found, request)
    sizes = {"tp_size": best.tp_size, "pp_size": best.pp_size, "cp_size": best.cp_size}
    options = {"microbatch_size": best.rows}
    if best.recomputation != request["recomputation"]:
        options["gradient_checkpointing"] = best.recomputation
    return {"options": {**sizes, **options}, "layout": str(best)}


def _preferred(found: Plan, request: dict[str, Any]) -> Layout:
    """Return the fastest layout that fits with the options of the script, else the fastest."""
    as_given = [
        each.layout
        for each in found.ranked
        if each.layout.recomputation == request["recomputation"]
        and each.layout.sequence == (request["sequence"] and each.layout.tp_size > 1)
        and each.layout.zero_size is None
    ]
    return as_given[0] if as_given else found.ranked[0].layout


if __name__ == "__main__":
    main()
