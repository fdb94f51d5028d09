"""Output of a run: the final table, the loss curve as a picture, the figures as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError

import torch
import torch.distributed as dist

_KIB = 1024
_MIB = 1024 * 1024


def prepare_directory(path: Path, option: str) -> None:
    """Check that files can be written to `path`, before hours are spent on the results.

    Raises:
        ConfigurationError: the directory cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(
            f"{option} {path} cannot be written to ({reason}); give a directory that can"
        ) from None


def peak_memory_of_ranks(device: torch.device) -> list[float]:
    """Return the peak memory of every rank in MiB: of its GPU if there is one, else of the process. Collective."""
    if device.type == "cuda":
        peak = float(torch.cuda.max_memory_allocated(device))
    else:
        # ru_maxrss is in KiB on Linux and in bytes on macOS.
        peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else _KIB))
    own = torch.tensor([peak / _MIB], dtype=torch.float64, device=device)
    peaks = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, own)
    return [value.item() for value in peaks]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically: a reader sees the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def hash_of_weights(directory: Path) -> str:
    """Return a SHA-256 of the names and bytes of the tensors that `save_model` has written to a directory."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    tensors = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plot_losses(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Plot loss over optimizer steps, one line per run: faint raw values and a running mean."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for index, (name, losses) in enumerate(curves.items()):
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color=f"C{index}", alpha=0.2, linewidth=0.8)
        # Coinciding curves stay visible because each is dashed with its own phase.
        style = (2 * index, (4, 2 * max(len(curves) - 1, 0))) if len(curves) > 1 else "solid"
        axes.plot(steps, _running_mean(losses), color=f"C{index}", linestyle=style, label=name)
    axes.set(xlabel="optimizer step", ylabel="training loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _running_mean(values: Sequence[float], window: int = 20) -> list[float]:
    """Return the mean of each value and its predecessors in the window."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]
