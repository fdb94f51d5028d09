"""Bandwidth of saving, loading and streaming a model, against safetensors and torch.save of the same bytes."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.checkpoint_state import copy_into, replace
from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.live_bytes import LiveBytes
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

_BUCKET_MB = 256  # four times the largest tensor
_WAYS = ("safetensors.save_file", "torch.save", "save_model")


def build(layers: int) -> nn.Module:
    """Create a Llama of 1.1 GB with 4 layers, whose tensors have the sizes of a 1B-parameter model's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 2048}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def measure(layers: int, repeats: int, tp_size: int, folder: str) -> dict[str, list[float]]:
    """Return seconds of each way per turn, and "bytes"; rank 0 alone runs the other systems, with whole tensors."""
    whole = build(layers)
    tensors = {name: tensor.detach().clone() for name, tensor in whole.state_dict().items()}
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tp_size, num_microbatches=1))
    model = booster.boost(whole)
    path = Path(folder)
    theirs, torchs = path / "theirs.safetensors", path / "theirs.bin"
    saves = {
        _WAYS[0]: _on_rank_0(lambda: replace(theirs, lambda new: save_file(tensors, new))),
        _WAYS[1]: _on_rank_0(lambda: replace(torchs, lambda new: torch.save(tensors, new))),
        _WAYS[2]: lambda: booster.save_model(model, path / "ours"),
    }
    with mock.patch("os.fsync", lambda file: None):
        times = {f"{name}, no fsync": found for name, found in turns(saves, repeats, before=os.sync).items()}
    times |= {f"{name}, fsync": found for name, found in turns(saves, repeats, before=os.sync).items()}
    loads = {
        "safetensors.load_file": _on_rank_0(lambda: copy_into(load_file(theirs), tensors)),
        "load_model": lambda: booster.load_model(model, path / "ours"),
    }
    times |= turns(loads, repeats)

    def stream() -> None:
        for name, tensor in booster.weights(model, bucket_size_in_mb=_BUCKET_MB, to_rank=0):
            tensors[name].copy_(tensor)

    def through_files() -> None:
        saves[_WAYS[2]]()
        _on_rank_0(lambda: [copy_into(load_file(file), tensors) for file in (path / "ours").glob("*.safetensors")])()

    with mock.patch("os.fsync", lambda file: None):
        times |= turns({"weights": stream, "save_model and load_file": through_files}, repeats)
    with LiveBytes() as alive:
        stream()
    times["peak"] = [float(alive.peak)]
    return {**times, "bytes": [float(sum(tensor.nbytes for tensor in tensors.values()))]}


def _on_rank_0(work: Callable[[], Any]) -> Callable[[], None]:
    return lambda: work() and None if dist.get_rank() == 0 else None


def report(quick: bool) -> str:
    rows: list[list[object]] = []
    streams: list[list[object]] = []
    for tp_size in (1, 2):
        with tempfile.TemporaryDirectory(prefix="bandwidth-") as folder:
            found = run_ranks(measure, tp_size, 1 if quick else 4, 2 if quick else 7, tp_size, folder)
        size = found["bytes"][0] / 1e9
        for kind in ("no fsync", "fsync"):
            ours, theirs, torchs = (f"{way}, {kind}" for way in (_WAYS[2], _WAYS[0], _WAYS[1]))
            speed = size / statistics.median(found[ours])
            rows.append([tp_size, f"save, {kind}", ratio(found, ours, theirs), ratio(found, ours, torchs), speed])
        speed = size / statistics.median(found["load_model"])
        rows.append([tp_size, "load", ratio(found, "load_model", "safetensors.load_file"), "", speed])
        faster = ratio(found, "weights", "save_model and load_file")
        streams.append([tp_size, faster, size / statistics.median(found["weights"]), found["peak"][0] / 1e9 / size])
    files = table(
        "Model directories: bandwidth against one safetensors file of the same bytes on the same disk",
        ["tp", "", "of safetensors", "of torch.save", "GB/s"],
        rows,
        "Files are read from the page cache; `load_file` is counted with the copy into the model's tensors. Above 1, "
        "ours is faster; medians of the ratios of each turn.",
    )
    return (
        files
        + "\n"
        + table(
            "Weights that stream to rank 0, against the way through files",
            ["tp", "of save_model and load_file", "GB/s", "peak beyond the model"],
            streams,
            f"`booster.weights(to_rank=0, bucket_size_in_mb={_BUCKET_MB})` into tensors, no fsync. Peak: bytes alive "
            "on rank 0 of what operators create, of the bytes of the model.",
        )
    )
