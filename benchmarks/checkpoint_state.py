"""Bandwidth of save_checkpoint and load_checkpoint against torch.save and safetensors of the same bytes; stall time.

With torch.save and safetensors every rank writes its share of the bytes to its own file, all at once: this is the
bandwidth of the disk.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.harness import ratio, run_ranks, table, turns
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

_LAYERS, _WIDTH = 21, 2048  # 336 MiB of parameters; 1008 MiB with the states of Adam


class _State:
    """Boosted model with Adam, and this rank's share of their bytes as plain tensors.

    Args:
        layers: number of matrices of 16 MiB each.
    """

    def __init__(self, layers: int) -> None:
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
        self.booster = Booster(plugin=HybridParallelPlugin())
        self.model, self.optimizer = self.booster.boost(model, torch.optim.Adam(model.parameters()))
        loss = self.model(torch.ones(1, _WIDTH)).sum()
        self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        share = 3 * layers * _WIDTH // dist.get_world_size()
        self.plain = {f"{row}": torch.randn(128, _WIDTH) for row in range(share // 128)}
        self.bytes = 3 * layers * _WIDTH * _WIDTH * 4

    @property
    def objects(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


def measure(layers: int, repeats: int, folder: str) -> dict[str, list[float]]:
    """Return the seconds of each way on the slowest rank, per turn."""
    state, path = _State(layers), Path(folder)
    mine = path / f"plain-{dist.get_rank()}"
    stalls: list[float] = []

    def asynchronously() -> None:
        saved = state.booster.save_checkpoint(path / "ours", **state.objects, asynchronous=True)
        stalls.append(saved.stall_s)
        saved.wait()

    saves: dict[str, Callable[[], object]] = {
        "safetensors": lambda: replace(mine, lambda new: save_file(state.plain, new)),
        "save": lambda: state.booster.save_checkpoint(path / "ours", **state.objects),
        "torch.save": lambda: replace(Path(f"{mine}.pt"), lambda new: torch.save(state.plain, new)),
    }
    with mock.patch("os.fsync", lambda file: None):
        found = {f"{name}, no fsync": times for name, times in turns(saves, repeats, before=os.sync).items()}
    ways = {**saves, "async": asynchronously}
    found |= {f"{name}, fsync": times for name, times in turns(ways, repeats, before=os.sync).items()}
    loads = {
        "load_file": lambda: copy_into(load_file(mine), state.plain),
        "load": lambda: state.booster.load_checkpoint(path / "ours", **state.objects),
        "torch.load": lambda: copy_into(torch.load(f"{mine}.pt", weights_only=True), state.plain),
    }
    return {**found, **turns(loads, repeats), "stall": stalls[1:], "bytes": [float(state.bytes)]}


def replace(path: Path, save: Callable[[Path], object]) -> None:
    """Save with the least work by which a crash cannot lose the old file; our save gives the same guarantee."""
    new = path.with_name(f"{path.name}.new")
    save(new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(new, path)


def copy_into(found: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy loaded tensors into existing ones, as into a model's parameters."""
    for name, tensor in tensors.items():
        tensor.copy_(found[name])


def report(quick: bool) -> str:
    rows: list[list[object]] = []
    for world_size in (1, 4):
        with tempfile.TemporaryDirectory(prefix="bandwidth-") as folder:
            found = run_ranks(measure, world_size, 2 if quick else _LAYERS, 2 if quick else 9, folder)
        size = found["bytes"][0] / 1e9
        for kind in ("no fsync", "fsync"):
            ratios = [ratio(found, f"save, {kind}", f"{way}, {kind}") for way in ("safetensors", "torch.save")]
            rows.append([world_size, f"save, {kind}", *ratios, size / statistics.median(found[f"save, {kind}"])])
        # A replica reads all parameters, which are a third of the bytes, and its share of the optimizer states.
        read = world_size * (1 / 3 + 2 / 3 / world_size)
        ratios = [read * ratio(found, "load", way) for way in ("load_file", "torch.load")]
        rows.append([world_size, "load", *ratios, read * size / statistics.median(found["load"])])
        stall = statistics.median(found["stall"]) / statistics.median(found["save, fsync"])
        rows.append([world_size, "stall of an asynchronous save, of a save's time", stall, "", ""])
    return table(
        "Checkpoints: bandwidth against plain files of the same bytes on the same disk",
        ["ranks", "", "of safetensors", "of torch.save", "GB/s"],
        rows,
        "Ours verifies every byte before it reads. Files are read from the page cache. Ranks are replicas: "
        "each loads all parameters and its share of Adam's states, which is what the speed of loading counts. Above 1, "
        "ours is faster; medians of the ratios of each turn.",
    )
