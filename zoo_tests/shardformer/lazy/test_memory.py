"""A rank that builds a model lazily needs memory for its shard and one tensor, no more, and reads its shard alone.

The model is larger than 1 GiB in the campaign, and half as large in the suite; its processes have built nothing before.
If this fails, look for who keeps a whole tensor alive: `InitLog.values`, `read_piece`, or a layer that copies while it
is cut.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import record_module_init
from shardformer.lazy import pretrained
from shardformer.lazy.weight_files import read_piece
from zoo_tests.harness.ranks import RankPool

_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
}
_TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def _status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def _size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _measure(sizes: dict[str, int], layers: int, source: Path | None, save: Path | None) -> dict[str, int]:
    """Bytes: of the whole model, its largest tensor, this rank's shard, read from files, and at the peak."""
    booster = Booster(plugin=HybridParallelPlugin(**sizes, seed=3))
    with record_module_init():
        tiny = LlamaForCausalLM(LlamaConfig(**_TINY))
    booster.boost(tiny)  # imports what it needs
    read = []

    def counted(*args: Any) -> Tensor:
        piece = read_piece(*args)
        read.append(piece.numel() * piece.element_size())
        return piece

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _status("VmRSS")
    with record_module_init(), mock.patch.object(pretrained, "read_piece", counted):
        model = (
            LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=layers))
            if source is None
            else LlamaForCausalLM.from_pretrained(source)
        )
        whole, largest = _size(model), max(4 * parameter.numel() for parameter in model.parameters())
    with mock.patch.object(pretrained, "read_piece", counted):
        model = booster.boost(model)
    peak = _status("VmHWM") - before
    if save is not None:
        booster.save_model(model, save, size_per_shard="400MB")
    return {"whole": whole, "largest": largest, "shard": _size(model), "read": sum(read), "peak": peak}


@pytest.mark.parametrize(
    "layers", [pytest.param(5, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.campaign)]
)
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to tell the peak of memory")
def test_peak_memory_of_a_rank(layers: int, tmp_path: Path) -> None:
    sizes = {"tp_size": 2, "pp_size": 2}
    try:
        _check(sizes, layers, None, tmp_path)
        _check(sizes, layers, tmp_path, None)
    finally:
        shutil.rmtree(tmp_path)  # pytest would keep it


def _check(sizes: dict[str, int], layers: int, source: Path | None, save: Path | None) -> None:
    pool = RankPool(4)
    try:
        found = pool.run(_measure, (sizes, layers, source, save), {}, timeout_s=300)
    finally:
        pool.stop()
    for figures in found:
        assert figures["whole"] >= (2**30 if layers > 5 else 2**29)
        assert figures["shard"] < 0.3 * figures["whole"]
        assert figures["shard"] < figures["peak"] <= 1.15 * figures["shard"] + figures["largest"], figures
        assert figures["read"] == (figures["shard"] if source is not None else 0), figures
