"""A rank that builds a model needs memory for its shard and one tensor, no more, and reads its shard alone.

Each way runs in processes that have built nothing before. If this fails, look for who keeps a whole tensor alive:
`InitLog.values`, `read_piece`, or a layer that copies while it is cut; or for freed memory that is not returned
(`shardformer/utils/freed_memory.py`).
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from benchmarks.construction_memory import CASES, Construction, Way, measure
from shardformer.lazy import weight_files
from shardformer.lazy.weight_files import read_piece
from zoo_tests.harness.ranks import RankPool

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK) or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="needs Linux to tell the peak of memory, and glibc to keep it low",
)
_BUCKET = 4  # MiB
_LOADER = 6 * 2**20  # bytes of Python objects: the model without values, and transformers' record of what it loads
# Without the return of freed memory these peaked at 1.27 and 1.11 shards beyond the largest tensor.
_IN_SUITE = [
    ({"vocab_size": 3001, "hidden_size": 520, "intermediate_size": 5354, "heads": 4, "layers": 6}, {"tp_size": 2}),
    ({"vocab_size": 6351, "hidden_size": 800, "intermediate_size": 4196, "heads": 8, "layers": 4}, {"tp_size": 2}),
]


def _random_case(seed: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of a Llama of about 500 MiB, and a layout."""
    draw = random.Random(seed)
    heads = draw.choice([4, 8])
    hidden, between = heads * 2 * draw.randrange(20, 100), 2 * draw.randrange(100, 3000)
    sizes = {"vocab_size": draw.randrange(200, 40000), "hidden_size": hidden, "intermediate_size": between}
    layers = 500 * 2**20 // (16 * hidden**2 + 12 * hidden * between)
    layout = draw.choice([{"tp_size": 2, "pp_size": 2}, {"tp_size": 4}, {"tp_size": 1, "pp_size": 4}, {"tp_size": 2}])
    return {**sizes, "heads": heads, "layers": max(4, min(24, layers))}, layout


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep it


def _measured(*arguments: Any) -> tuple[Construction, int]:
    """Return what `measure` finds, and the bytes that were read from files piece by piece."""
    read = []

    def counted(*args: Any) -> Tensor:
        piece = read_piece(*args)
        read.append(piece.nbytes)
        return piece

    with mock.patch.object(weight_files, "read_piece", counted):
        return measure(*arguments), sum(read)


def _on_new_ranks(
    way: Way, sizes: dict[str, int], options: dict[str, Any], *arguments: Any, replicas: int = 1
) -> Iterator[Construction]:
    pool = RankPool(options.get("tp_size", 1) * options.get("pp_size", 1) * replicas)
    try:
        for found, read in pool.run(_measured, (way, sizes, options, *arguments), {}, timeout_s=300):
            assert read == (found.shard if way == "from_pretrained" else 0) or replicas > 1
            yield found
    finally:
        pool.stop()


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [pytest.param(*case, marks=pytest.mark.slow, id=f"awkward {at}") for at, case in enumerate(_IN_SUITE)]
    + [pytest.param(*case, marks=pytest.mark.campaign, id=f"large {at}") for at, case in enumerate(CASES)]
    + [pytest.param(*_random_case(seed), marks=pytest.mark.campaign, id=f"random {seed}") for seed in range(12)],
)
def test_peak_memory_of_a_rank(sizes: dict[str, int], layout: dict[str, int], directory: Path) -> None:
    for found in _on_new_ranks("drawn", sizes, layout, None, False, directory):
        assert found.shard < 0.6 * found.whole
        assert found.shard < found.peak <= 1.1 * found.shard + found.largest, found
        assert found.resident <= 1.1 * found.shard, found
    for way in ("from_pretrained", "load_model"):
        for found in _on_new_ranks(way, sizes, layout, directory):
            assert found.shard < found.peak <= 1.1 * found.shard + found.largest + _LOADER, (way, found)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "trains"), [("fp32", True), ("bf16", True), ("bf16", False)])
def test_precision_and_an_optimizer_add_a_bucket_to_the_peak(precision: str, trains: bool) -> None:
    sizes, layout = _IN_SUITE[0]
    options = {**layout, "precision": precision, "zero_bucket_size_in_mb": _BUCKET}
    bytes_of_element = (4 if precision == "fp32" else 2) + (4 if precision == "bf16" and trains else 0)  # and a master
    for found in _on_new_ranks("drawn", sizes, options, None, trains):
        assert found.shard < 0.51 * found.whole / 4 * bytes_of_element
        # A parameter larger than a bucket has a bucket of its own.
        assert found.peak <= 1.1 * found.shard + found.largest + trains * _BUCKET * 2**20, found


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True])
def test_a_model_built_before_boost_leaves_shards_alone(trains: bool) -> None:
    # Its tensors are below the threshold from which on malloc returns memory at once: 2.9 shards stayed.
    sizes = {"vocab_size": 2204, "hidden_size": 528, "intermediate_size": 382, "heads": 4, "layers": 12}
    for found in _on_new_ranks("built before boost", sizes, {"tp_size": 2}, None, trains):
        assert found.resident <= 1.1 * found.shard, found


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "replicas"), [({}, 2), ({"precision": "bf16"}, 2), ({"tp_size": 2}, 2)])
def test_stage_3_shards_each_tensor_as_it_gets_values(layout: dict[str, Any], replicas: int, directory: Path) -> None:
    sizes, options = {**_IN_SUITE[0][0], "layers": 8}, {**layout, "zero_stage": 3}
    # fp32 masters and bf16 parameters are 6 bytes of each 4.
    part = 1.01 / replicas / options.get("tp_size", 1) * (1.5 if "precision" in options else 1)
    for found in _on_new_ranks("drawn", sizes, options, None, True, directory, replicas=replicas):
        assert found.shard < part * found.whole
        assert found.shard < found.peak <= 1.1 * found.shard + max(found.layer, found.largest), found
        assert found.resident <= 1.1 * found.shard, found
        assert found.saving <= 1.1 * found.shard + 2 * max(found.layer, found.largest), found
    for found in _on_new_ranks("from_pretrained", sizes, options, directory, True, replicas=replicas):
        assert found.shard < found.peak <= 1.1 * found.shard + max(found.layer, found.largest) + _LOADER, found
