"""Several ranks on GPUs: losses of three steps are those of plain torch on one of them.

With a GPU for each rank they communicate by NCCL. With fewer, all ranks share the first GPU, and their tensors travel
through host memory over gloo (`staging.py`).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from zoo_tests.gpu.training import FP32, LAYOUTS, generate, needs_real_gpu, on_ranks, resume, train, train_to_bits
from zoo_tests.harness.ranks import RankError

REPRODUCED: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batches": (1, {"num_microbatches": 4}),
    "tp2": (2, {"tp_size": 2}),
    "tp2, sequence parallelism": (2, {"tp_size": 2, "enable_sequence_parallelism": True}),
    "pp2, zero-bubble": (2, {"pp_size": 2, "pp_style": "zbv"}),
    "dp2, ZeRO-2": (2, {"dp_size": 2, "zero_stage": 2, "zero_bucket_size_in_mb": 0.05}),
    "cp2": (2, {"cp_size": 2}),
    "tp2-pp2": (4, {"tp_size": 2, "pp_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str) -> None:
    family, world_size, options = LAYOUTS[layout]
    needs_real_gpu(options)
    for losses, plain in on_ranks(world_size, train, family, options):
        assert losses == pytest.approx(plain, rel=FP32)


@cache
def _bits(family: str, options: tuple[tuple[str, Any], ...], world_size: int = 1) -> Any:
    with TemporaryDirectory() as directory:
        return on_ranks(world_size, train_to_bits, family, directory, dict(options))[0]


@pytest.mark.parametrize("layout", REPRODUCED)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_same_bits(family: str, layout: str) -> None:
    world_size, options = REPRODUCED[layout]
    on = (("reproducible", True),)
    assert _bits(family, (*on, *options.items()), world_size) == _bits(family, on)


def test_bits_of_products_in_16_bit_are_refused() -> None:
    with pytest.raises(RankError, match="reproducible=True refuses 16-bit products on GPUs"):
        _bits("bert", (("reproducible", True), ("precision", "bf16")))


def test_without_reproducible_bits_differ() -> None:
    assert _bits("bert", (("tp_size", 2),), 2) != _bits("bert", ())


def test_compiled_layers_on_two_ranks() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    for losses, plain in on_ranks(2, train, "llama", {"tp_size": 2, "compile_layers": True}):
        assert losses == pytest.approx(plain, rel=FP32)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_checkpoint_opens_under_another_layout(asynchronous: bool, tmp_path: Path) -> None:
    before, after = {"dp_size": 2}, {"tp_size": 2}
    for went_on, resumed in on_ranks(2, resume, str(tmp_path / "saved"), before, after, asynchronous):
        assert resumed == pytest.approx(went_on, rel=FP32)


def test_generate() -> None:
    for tokens, plain in on_ranks(2, generate, {"tp_size": 2}):
        assert tokens == plain
