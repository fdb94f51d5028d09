"""`booster plan`: rank the layouts of a model on given devices, and list those that fit, fastest first."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
from torch import nn

from booster.cli.command_parser import CommandParser, prints_json, write_json
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.cli.arguments import adapter_config, count, model_builder, model_of, refuse_bad_places
from plugins.hybrid_parallel.config.groups import CPU, PRECISIONS
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.planner.device import PRESETS, Device, Link, preset
from plugins.hybrid_parallel.planner.plan import Job, Plan, bytes_of, plan_for
from plugins.hybrid_parallel.planner.proxy_model import KINDS, Packing, QuantisedBase, quantised_by, with_adapter
from plugins.hybrid_parallel.planner.report import (
    FailureAssumptions,
    draw,
    goodput_text,
    goodputs,
    machines_of,
    shortage,
    to_json,
    to_text,
)

_HERE = "this-machine"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0."""
    options = parser().parse_args(arguments)
    refuse_bad_places(options.output, options.table, options.plot, options.json)
    if options.choose > 1 and options.output is None:
        raise ConfigurationError(f"--choose {options.choose} says which row is written, and no file is; add --output")
    if sys.stderr.isatty():
        _show_progress()
    build, quantised = _model(options)
    gc.freeze()  # exclude imported modules from garbage collection: scanning them takes a fifth of the time
    plan, device = plan_for(build, job := _job(options, quantised), _device(options))
    tokens = float(job.global_batch * job.length)
    title = (
        f"{options.model} on {job.world_size} x {device.name}, {job.global_batch} samples of {job.length} tokens, "
        f"{job.precision}"
    )
    speaks = sys.stderr if prints_json(options.json) else sys.stdout
    if not prints_json(options.json) and plan.ranked:
        sys.stdout.write(f"{title}\n\n{to_text(plan, device, tokens, options.top)}\n")
    document = to_json(plan, device, tokens)
    if 0 < options.choose <= len(plan.ranked) and options.device_mtbf is not None:
        document["goodput"] = _goodput(plan, device, options, speaks)
    for place in filter(None, (options.table, options.json)):
        write_json(document, place)
    if not plan.ranked:
        raise ConfigurationError(shortage(plan, device))
    if options.choose > len(plan.ranked):
        raise ConfigurationError(f"--choose {options.choose} is beyond the {len(plan.ranked)} layouts that fit; use 1")
    if options.output is not None:
        chosen = plan.ranked[options.choose - 1].layout
        options.output.write_text(json.dumps(chosen.description(), indent=2) + "\n")
        speaks.write(f"\n{chosen} is in {options.output}, for HybridParallelPlugin.from_config\n")
    if options.plot is not None:
        draw(plan, device, options.plot, title, options.top)
    return 0


def _model(options: argparse.Namespace) -> tuple[Callable[[], nn.Module], QuantisedBase | None]:
    """Return the function that builds the model, and how its base is stored."""
    build = model_builder(options.model, options.head)
    quantised = quantised_by(model_of(options.model, options.head)[0], options.quantised)
    if options.adapter is None:
        if quantised is not None:
            raise ConfigurationError(
                f"a base in {quantised.kind} is frozen, and nothing else would be trained; give --adapter, the "
                "directory of an adapter of peft"
            )
        return build, None
    return with_adapter(build, adapter_config(options.adapter)), quantised


def _job(options: argparse.Namespace, quantised: QuantisedBase | None) -> Job:
    on_cpus = options.device == _HERE and not torch.cuda.is_available()
    offload = options.offload or (None if on_cpus else CPU)
    if offload == CPU and on_cpus:
        raise ConfigurationError("--offload cpu changes nothing on CPU ranks, whose memory it is; give a directory")
    if options.varlen and options.packed_documents is None:
        raise ConfigurationError(
            "--varlen is about documents of packed rows; give their mean length, --packed-documents"
        )
    kernels = tuple(filter(None, options.kernels.split(",")))
    HybridParallelConfig.from_options(**dict.fromkeys(kernels, True))  # names an unknown one
    packing = None
    if options.packed_documents is not None:
        packing = Packing(options.packed_documents, options.sequence_length, options.varlen)
    return Job(
        options.devices,
        options.global_batch,
        options.sequence_length,
        options.precision,
        options.max_tp,
        options.max_cp,
        memory=options.memory,
        packing=packing,
        quantised=quantised,
        offload=None if offload == "none" else offload,
        kernels=kernels,
    )


def _goodput(plan: Plan, device: Device, options: argparse.Namespace, speaks: TextIO) -> dict[str, dict[str, float]]:
    """Print how much of a run is training under the chosen layout with failures, and return it as JSON."""
    assumed = FailureAssumptions(
        options.device_mtbf, options.storage * 1e9, options.restart_seconds, options.repair_hours
    )
    chosen = plan.ranked[options.choose - 1]
    results = goodputs(chosen, device, assumed)
    machines, uptime = machines_of(chosen.layout, device, assumed)
    speaks.write(f"\n{chosen.layout}: {goodput_text(results, machines, uptime / machines)}\n")
    return {name: asdict(each) for name, each in results.items()}


def _show_progress() -> None:
    """Log the planner's progress to the terminal."""
    planner = logging.getLogger("plugins.hybrid_parallel.planner")
    planner.addHandler(logging.StreamHandler())
    planner.setLevel(logging.INFO)


def _device(options: argparse.Namespace) -> Device | None:
    """Return the named preset with the given changes; None to measure this machine."""
    changes = {
        "disk": None if options.disk is None else options.disk * 1e9,
        "node_size": options.node_size,
        "flops": None if options.flops is None else dict.fromkeys(PRECISIONS, options.flops * 1e12),
    }
    given = [name for name in ("node_size", "flops", "intra", "inter", "disk") if getattr(options, name) is not None]
    if options.device == _HERE:
        if given:
            raise ConfigurationError(
                f"--{given[0].replace('_', '-')} changes what {_HERE} is measured to be; name a device, such as H100"
            )
        return None
    device = preset(options.device, **changes)
    links = {"inside": (device.inside, options.intra), "between": (device.between, options.inter)}
    faster = {key: Link(link.latency, rate * 1e9) for key, (link, rate) in links.items() if rate is not None}
    return preset(options.device, **changes, **faster)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    command = CommandParser(
        prog="booster plan",
        description="Predict memory and time of every layout of a model, without devices and without weights.",
        examples=(
            "booster plan config.json --devices 64 --device H100",
            "booster plan config.json --devices 8 --memory 24GiB --output layout.json --plot plan.png",
            "booster plan bert-base-uncased --head MaskedLM --devices 2 --device this-machine --precision fp32",
            "booster plan config.json --devices 64 --json",
        ),
    )
    command.add_argument("model", help="a model's directory, its config.json, or a name that is in the cache")
    command.add_argument("--head", help="the model's class, such as LlamaForCausalLM, or what it is for, as CausalLM")
    command.add_argument(
        "--adapter", help="an adapter of peft, or its configuration, which is trained instead of the base"
    )
    command.add_argument("--quantised", choices=KINDS, help="how bitsandbytes stores the base (as config.json says)")
    command.add_argument("--devices", type=count, default=8, help="how many (8)")
    command.add_argument("--device", default="H100", help=f"{', '.join(PRESETS)} or {_HERE}, which is measured (H100)")
    command.add_argument("--memory", type=_size, help="memory of a device, such as 24GiB or 24GB; GiB without a unit")
    command.add_argument("--flops", type=_positive, help="dense TFLOP/s of a device, by its specification")
    command.add_argument("--node-size", type=count, help="devices of a node")
    command.add_argument("--intra", type=_positive, help="GB/s that a device sends inside of a node")
    command.add_argument("--inter", type=_positive, help="GB/s that a device sends between nodes")
    command.add_argument("--disk", type=_positive, help="GB/s of the directory of --offload, for each device")
    command.add_argument("--global-batch", type=count, default=256, help="samples of a step (256)")
    command.add_argument("--sequence-length", type=count, default=2048, help="tokens of a sample (2048)")
    command.add_argument(
        "--packed-documents", type=count, help="a sample is a packed row, of documents of this many tokens in the mean"
    )
    command.add_argument(
        "--varlen", action="store_true", help="flash-attn keeps packed documents apart, without a mask"
    )
    command.add_argument(
        "--kernels", default="", help="switches of the plugin for all layouts: tiled_mlp,enable_fused_normalization"
    )
    command.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of training (bf16)")
    command.add_argument("--max-tp", type=count, help="tensor-parallel ranks at most (those of a node)")
    command.add_argument("--max-cp", type=count, help="context-parallel ranks at most (1024 tokens of a sample each)")
    command.add_argument(
        "--offload", help="where layouts may offload to, if no other fits: cpu, a directory or none (cpu; none on CPUs)"
    )
    command.add_argument(
        "--device-mtbf", type=_positive, help="hours between failures of one device: adds how much of a run is training"
    )
    command.add_argument(
        "--storage", type=_positive, default=0.12, help="GB/s of the shared file system, for each device (0.12)"
    )
    command.add_argument(
        "--restart-seconds", type=_positive, default=300.0, help="until a new process trains after a failure (300)"
    )
    command.add_argument("--repair-hours", type=_positive, default=4.0, help="until a machine that failed is back (4)")
    command.add_argument("--top", type=count, default=10, help="layouts that are shown (10)")
    command.add_argument("--choose", type=count, default=1, help="the row that is written (1)")
    command.add_argument("--output", type=Path, help="write the chosen row for HybridParallelPlugin.from_config")
    command.add_argument("--table", type=Path, help="write all rows, and why each rejected layout fails, as JSON")
    command.add_argument("--plot", type=Path, help="draw memory and time of the rows that are shown")
    command.add_json()
    return command


def _size(text: str) -> float:
    try:
        return bytes_of(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number, such as 80")
    return value
