"""`booster doctor`: what this machine and this environment offer to a job."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from booster.cli.main import CommandParser

_REQUIRED = ("torch", "transformers", "accelerate", "safetensors")
# Import name -> distribution name, and what goes on without it.
_OPTIONAL = {
    "flash_attn": ("flash-attn", "attention runs through torch's own kernels"),
    "apex": ("apex", "norms run through torch's own kernels"),
    "liger_kernel": ("liger-kernel", "norms and losses run through torch's own kernels"),
}
_MIB = 2**20


def main(arguments: list[str]) -> int:
    """Print the report.

    Returns:
        0, or 1 if a required package is missing.
    """
    parser: argparse.ArgumentParser = CommandParser(
        prog="booster doctor", description="Show versions, devices, backends and optional packages."
    )
    parser.parse_args(arguments)
    sections = {
        "Versions": _versions(),
        "Devices": _devices(),
        "Backends": _backends(),
        "Optional packages": _optional(),
        "Plugins": _plugins(),
    }
    width = max(len(name) for rows in sections.values() for name in rows)
    for title, rows in sections.items():
        sys.stdout.write(f"{title}\n")
        sys.stdout.writelines(f"  {name:<{width}}  {value}\n" for name, value in rows.items())
    return 1 if any(_version(name) is None for name in _REQUIRED) else 0


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


def _optional() -> dict[str, str]:
    rows = {}
    for module, (distribution, without) in _OPTIONAL.items():
        there = find_spec(module) is not None
        rows[distribution] = _version(distribution) or "yes" if there else f"no: {without}"
    return rows


def _plugins() -> dict[str, str]:
    from booster.plugin import available_plugins

    return {name: "installed" for name in available_plugins()} or {"none": "install the project: pip install -e ."}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
