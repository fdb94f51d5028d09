"""`booster doctor`: a report on this machine and environment.

Plugins add their own sections: a module in the entry point group `booster.checks`, with `add_options(parser)` and
`sections(options)`, which returns a list of `Section`.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from booster.cli.command_parser import CommandParser, prints_json, write_json
from booster.cli.front import version_of
from booster.launch import place_from_environment

_REQUIRED = ("torch", "transformers", "accelerate", "safetensors")
_MIB = 2**20


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    key: str  # its key in JSON
    title: str  # its title in text
    rows: dict[str, str]  # name -> text
    values: Any = None  # its value in JSON; None for the rows


def main(arguments: list[str]) -> int:
    """Print the report; in a job, only rank 0 prints.

    Returns:
        0, or 1 if a required package is missing.
    """
    options = parser().parse_args(arguments)
    further = [section for check in _checks() for section in check.sections(options)]
    if place_from_environment(os.environ).rank == 0:
        sections = [_versions(), _devices(), _backends(), _plugins(), *further]
        if not prints_json(options.json):
            _print(sections)
        if options.json is not None:
            report = {each.key: each.rows if each.values is None else each.values for each in sections}
            write_json(report, options.json)
    return 1 if any(version_of(name) is None for name in _REQUIRED) else 0


def parser() -> CommandParser:
    """Return the parser of the command line, with the options of plugins."""
    command = CommandParser(
        prog="booster doctor",
        description="Show versions, devices, backends, what is missing for each optimisation, and, with ranks, how "
        "fast they reach each other.",
        examples=(
            "booster doctor",
            "booster doctor --nproc-per-node 4 --tp 2 --pp 2",
            "booster doctor --json",
            "booster run --nnodes 2 --nproc-per-node 8 -m booster doctor --tp 8 --json links.json",
        ),
    )
    command.add_json()
    for check in _checks():
        check.add_options(command)
    return command


def _checks() -> list[Any]:
    return [entry.load() for entry in entry_points(group="booster.checks")]


def _print(sections: list[Section]) -> None:
    width = max(len(name) for section in sections for name in section.rows)
    for section in sections:
        sys.stdout.write(f"{section.title}\n")
        sys.stdout.writelines(f"  {name:<{width}}  {value}\n" for name, value in section.rows.items())


def _versions() -> Section:
    found = {"hybrid-booster": version_of("hybrid-booster"), "python": platform.python_version()}
    found |= {name: version_of(name) for name in _REQUIRED}
    return Section("versions", "Versions", {name: number or "missing" for name, number in found.items()}, found)


def _devices() -> Section:
    import torch

    rows = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used by torch"}
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    for index, gpu in enumerate(gpus):
        rows[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory // _MIB} MiB"
    values = {
        "cpu": {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "cuda": [{"name": gpu.name, "bytes": gpu.total_memory} for gpu in gpus],
    }
    if not torch.cuda.is_available():
        rows["cuda"] = "none: jobs run on the CPU"
    return Section("devices", "Devices", rows, values)


def _backends() -> Section:
    import torch.distributed as dist

    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return Section("backends", "Backends", {name: "yes" if there else "no" for name, there in found.items()}, found)


def _plugins() -> Section:
    from booster.plugin import available_plugins

    found = available_plugins()
    rows = {name: "installed" for name in found} or {"none": "install the project: pip install -e ."}
    return Section("plugins", "Plugins", rows, found)
