"""Sections that the plugin adds to `booster doctor`: optimisations, and link benchmarks for each mesh axis."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from booster.cli.doctor import Section
from booster.errors import ConfigurationError
from booster.launch import launch_from_torch, place_from_environment
from plugins.hybrid_parallel.cli.arguments import add_sizes, count, refuse_bad_places
from plugins.hybrid_parallel.config.groups import ParallelOptions
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure, devices_for, run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import AXES, build_mesh

if TYPE_CHECKING:
    from plugins.hybrid_parallel.planner.calibrate import LinkMeasurement


def optimisations() -> dict[str, str]:
    """Return name -> "available", or the fallback and what to install."""
    import torch
    import torch.distributed as dist

    from shardformer.attention.backend import is_installed
    from shardformer.layers.fused_ops import has_compiler
    from shardformer.layers.norm import LAYER_NORM_PACKAGES, RMS_NORM_PACKAGES, are_installed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    compiler = "triton" if device == "cuda" else "a C++ compiler (g++)"
    sdpa = "attention runs through torch's SDPA"
    rows = [
        ("flash-attn", is_installed("flash_attention_2"), sdpa, "flash-attn"),
        ("flash-attn 3", is_installed("flash_attention_3"), sdpa, "the hopper folder of flash-attn, for Hopper GPUs"),
        ("xformers", is_installed("xformers"), sdpa, "xformers"),
        (
            "apex",
            are_installed(LAYER_NORM_PACKAGES),
            "layer norms run through torch's kernel",
            "apex with its CUDA extensions",
        ),
        ("liger-kernel", are_installed(RMS_NORM_PACKAGES), "RMS norms run through torch's kernel", "liger-kernel"),
        ("fused operators", has_compiler(device), "enable_jit_fused runs eagerly", compiler),
        ("NCCL", dist.is_nccl_available(), "GPUs talk through gloo, by way of the CPU", "a build of torch for CUDA"),
        ("safetensors", _is_there("safetensors"), "weights cannot be read in slices", "safetensors"),
        ("torchrun", shutil.which("torchrun") is not None, "`booster run` starts jobs", "torch with its scripts"),
        ("matplotlib", _is_there("matplotlib"), "schedules are shown in text alone", "matplotlib"),
    ]
    found = {"attention here": _attention_here(device)}
    for name, there, without, what in rows:
        found[name] = "available" if there else f"missing: {without}; install {what}"
    return found


def _attention_here(device: str) -> str:
    """Return the attention kernel that a standard model gets in bf16."""
    import torch

    from shardformer.attention.backend import SDPA, AttentionNeeds, capability_of, choose_backend

    needs = AttentionNeeds(
        supports_flash=True,
        supports_sdpa=True,
        device=device,
        capability=capability_of(torch.device(device)),
        dtype=torch.bfloat16,
    )
    chosen = choose_backend(True, needs)
    return "torch's SDPA" if chosen.implementation == SDPA else str(chosen.implementation)


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


_TIMEOUT_S = 120.0
_GIGA, _MICRO = 1e9, 1e-6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's options of `booster doctor`."""
    parser.add_argument("--nproc-per-node", type=count, help="measure the links between so many ranks of this machine")
    add_sizes(parser)
    parser.add_argument("--output", type=Path, help="write the measurements to this file, as JSON")


def sections(options: argparse.Namespace) -> list[Section]:
    """Return the sections on optimisations, and on links between ranks; refuses a mesh that does not fit."""
    place = place_from_environment(os.environ)
    own = _optimisations() if place.rank == 0 else []
    in_a_job = place.world_size > 1
    world_size = place.world_size if in_a_job else options.nproc_per_node
    if world_size is None:
        asked = [name for name in ("output", "tp", "pp", "dp") if getattr(options, name) not in (None, 1)]
        if asked:
            raise ConfigurationError(f"--{asked[0]} is about links between ranks; add --nproc-per-node 4, say")
        rows = {"not measured": "use --nproc-per-node 4 --tp 2, or `booster run -m booster doctor`"}
        return [*own, Section("links", "Links", rows, {})]
    parallel = ParallelOptions(tp_size=options.tp, pp_size=options.pp, dp_size=options.dp)
    parallel.data_parallel_size(world_size)
    refuse_bad_places(options.output, options.json)
    if in_a_job:
        launch_from_torch(timeout_s=_TIMEOUT_S)
        axes = measure_mesh(parallel)
    else:
        axes = _on_local_ranks(parallel, world_size)
    links = {"ranks": world_size, "axes": {axis: asdict(measured) for axis, measured in axes.items()}}
    if options.output is not None and place.rank == 0:
        options.output.write_text(json.dumps(links, indent=2) + "\n", encoding="utf-8")
    return [*own, Section("links", f"Links between {world_size} ranks", _table(axes), links)]


def _optimisations() -> list[Section]:
    """Return the section; in JSON, whether each is available, and what there is instead."""
    rows = optimisations()
    values = {name: {"available": not text.startswith("missing"), "text": text} for name, text in rows.items()}
    return [Section("optimisations", "Optimisations", rows, values)]


def measure_mesh(parallel: ParallelOptions) -> dict[str, LinkMeasurement]:
    """Measure each axis that has more than one rank; all ranks of a job must call this.

    Returns:
        axis -> its measurement.
    """
    import torch.distributed as dist

    from plugins.hybrid_parallel.planner.calibrate import measure_axis

    mesh = build_mesh(*parallel.mesh_shape(dist.get_world_size()))
    return {
        axis: measure_axis(mesh.group(axis), mesh.device, point_to_point=axis == "pp")
        for axis in AXES
        if mesh.size(axis) > 1
    }


def _on_local_ranks(parallel: ParallelOptions, world_size: int) -> dict[str, LinkMeasurement]:
    device = devices_for(world_size)
    try:
        return run_on_local_ranks(measure_mesh, world_size, parallel, timeout_s=_TIMEOUT_S, device=device)[0]
    except RankFailure as error:
        raise ConfigurationError(f"links could not be measured, {error}; use fewer ranks than {world_size}") from None


def _table(axes: dict[str, LinkMeasurement]) -> dict[str, str]:
    """Format one line of latencies per axis, and one line per operation and size."""
    rows: dict[str, str] = {}
    for axis, measured in axes.items():
        what = "a message" if axis == "pp" else "an all-reduce"
        rows[f"{axis} of {measured.num_ranks}"] = (
            f"latency {measured.latency_s / _MICRO:.1f} us a step, "
            f"{measured.small_s / _MICRO:.1f} us for {what} of 8 bytes"
        )
        for each in measured.collectives:
            rows[f"{axis} {each.operation} {_size(each.num_bytes)}"] = (
                f"{each.seconds * 1e3:8.2f} ms  algorithm {each.algorithm_bandwidth / _GIGA:6.2f} GB/s  "
                f"bus {each.bus_bandwidth / _GIGA:6.2f} GB/s"
            )
    return rows or {"nothing": "no axis has more than one rank"}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB"
