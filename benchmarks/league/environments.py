"""The environments of systems that are not installed with this package: a folder each, made by one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# System -> folder, and what pip puts there without what the present environment has.
ENVIRONMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "DeepSpeed AutoTP": (
        "deepspeed",
        ("deepspeed", "hjson", "ninja", "py-cpuinfo", "msgpack", "einops", "pydantic", "pydantic-core")
        + ("annotated-types", "typing-inspection", "psutil"),
    ),
    "NeMo Automodel": ("nemo-automodel", ("nemo-automodel==0.7.0", "transformers==5.18.0")),  # which it asks for
}

# System -> modules that its ranks import before their first class.
IMPORTS: dict[str, tuple[str, ...]] = {
    "DeepSpeed AutoTP": ("deepspeed", "deepspeed.module_inject.layers"),
    "NeMo Automodel": (
        "nemo_automodel.components.distributed.parallelizer",
        "nemo_automodel.components.distributed.pipelining.autopipeline",
        "nemo_automodel.components.distributed.tp_replicas",
    ),
}


def prepare(folder: Path) -> int:
    """Install the other systems into folders of `folder`; returns an exit status."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target"]
    statuses = [
        subprocess.run([*command, str(folder / name), *packages], check=False).returncode
        for name, packages in ENVIRONMENTS.values()
    ]
    return max(statuses)


def path_of(system: str, folder: Path | None) -> Path | None:
    """Return the folder that comes first on a system's path of imports; None for the present environment.

    Raises:
        FileNotFoundError: the folder of the system is not there.
    """
    if system not in ENVIRONMENTS:
        return None
    found = (folder or Path()) / ENVIRONMENTS[system][0]
    if folder is None or not found.is_dir():
        raise FileNotFoundError(f"{system} needs --path with the folder that --prepare has made; {found} is not there")
    return found
