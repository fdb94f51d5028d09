"""`booster doctor`: a report on this machine and environment.

Plugins add their own sections: a module in the entry point group `booster.checks`, with `add_options(parser)` and
`sections(options)`, which returns title -> name -> text.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from booster.cli.main import CommandParser
from booster.launch import place_from_environment

ENTRY_POINT_GROUP = "booster.checks"
_REQUIRED = ("torch", "transformers", "accelerate", "safetensors")
_MIB = 2**20


def main(arguments: list[str]) -> int:
    """Print the report; in a job, only rank 0 prints.

    Returns:
        0, or 1 if a required package is missing.
    """
    checks = _checks()
    parser: argparse.ArgumentParser = CommandParser(
        prog="booster doctor",
        description="Show versions, devices, backends, what is missing for each optimisation, and, with ranks, how "
        "fast they reach each other.",
    )
    for check in checks:
        check.add_options(parser)
    options = parser.parse_args(arguments)
    further = [check.sections(options) for check in checks]
    if place_from_environment(os.environ).rank == 0:
        own = {"Versions": _versions(), "Devices": _devices(), "Backends": _backends(), "Plugins": _plugins()}
        _print({title: rows for sections in (own, *further) for title, rows in sections.items()})
    return 1 if any(_version(name) is None for name in _REQUIRED) else 0


def _checks() -> list[Any]:
    return [entry.load() for entry in entry_points(group=ENTRY_POINT_GROUP)]


def _print(sections: dict[str, dict[str, str]]) -> None:
    width = max(len(name) for rows in sections.values() for name in rows)
    for title, rows in sections.items():
        sys.stdout.write(f"{title}\n")
        sys.stdout.writelines(f"  {name:<{width}}  {value}\n" for name, value in rows.items())


def _versions() -> dict[str, str]:
    rows = {"hybrid-booster": _version("hybrid-booster") or "not installed", "python": platform.python_version()}
    return rows | {name: _version(name) or "missing" for name in _REQUIRED}


def _devices() -> dict[str, str]:
    import torch

    rows = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used by torch"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory // _MIB} MiB"
    if not torch.cuda.is_available():
        rows["cuda"] = "none: jobs run on the CPU"
    return rows


def _backends() -> dict[str, str]:
    import torch.distributed as dist

    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return {name: "yes" if there else "no" for name, there in found.items()}


def _plugins() -> dict[str, str]:
    from booster.plugin import available_plugins

    return {name: "installed" for name in available_plugins()} or {"none": "install the project: pip install -e ."}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
