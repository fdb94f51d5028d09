"""GPUs and packages that do not fit: one clear sentence on every rank, or one line in the log and another kernel."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from shardformer.attention import backend
from zoo_tests.harness.ranks import _destroy_groups, run_on_ranks
from zoo_tests.simcuda.test_training import Training

VOLTA, TURING, AMPERE = (7, 0), (7, 5), (8, 0)
_BROKEN = {
    "import": "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E\\nmore')",
    "library": "raise OSError('libcudart.so.11.0: cannot open shared object file')",
}


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is logged as a warning, as if nothing had been before."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("shardformer", "plugins", "booster")]
    backend._log_once.cache_clear()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def outcome(capability: tuple[int, int] | None, options: dict[str, Any]) -> tuple[str, list[str]]:
    """The refusal of a GPU's layout, empty after a good step, and the lines about it; None for the usual GPU."""
    asked = torch.cuda.get_device_capability
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability or asked(device)):
        with log_lines() as lines:
            try:
                assert Training("llama", **options).step(0) > 0
            except ConfigurationError as error:
                return str(error), lines
        return "", lines


# ----- GPUs -----


def outcomes_on_old_gpus() -> dict[str, tuple[str, list[str]]]:
    older = AMPERE if dist.get_rank() == 1 else None  # of two ranks one has an older GPU
    return {
        "fp8": outcome(older, {"tp_size": 2, "precision": "fp8"}),
        "mxfp8": outcome((9, 0), {"tp_size": 2, "precision": "fp8", "fp8_recipe": "mxfp8"}),
        "bf16": outcome(VOLTA, {"tp_size": 2, "precision": "bf16"}),
        "bf16 on Ampere": outcome(AMPERE, {"tp_size": 2, "precision": "bf16"}),
        "fp16": outcome(VOLTA, {"tp_size": 2, "precision": "fp16"}),
    }


def test_gpu_that_is_too_old_for_the_precision() -> None:
    for found in run_on_ranks(2, outcomes_on_old_gpus, device="simcuda"):
        refusal, _ = found["fp8"]
        assert refusal == (
            "precision='fp8' needs a GPU of compute capability 8.9 or more, and this one has 8.0; use precision='bf16'"
        )
        assert found["mxfp8"][0] == (
            "fp8_recipe='mxfp8' needs a GPU of compute capability 10.0 or more, and this one has 9.0; use "
            "fp8_recipe='tensorwise'"
        )
        assert [refusal for refusal, _ in found.values()][2:] == ["", "", ""]
        assert not found["bf16 on Ampere"][1] and not found["fp16"][1]
    (line,) = run_on_ranks(2, outcomes_on_old_gpus, device="simcuda")[0]["bf16"][1]
    assert "precision='bf16' is emulated, and slow, on a GPU of compute capability 7.0" in line


def outcome_on_one_gpu() -> str:
    _destroy_groups()  # the device of a grid of ranks is looked at when its groups are made
    asked = torch.cuda.get_device_properties
    same = lambda device=None: SimpleNamespace(**{**vars(asked(device)), "uuid": "GPU-5"})  # noqa: E731
    with mock.patch.object(torch.cuda, "get_device_properties", same):
        return outcome(None, {"tp_size": 2})[0]


def test_two_ranks_on_one_gpu() -> None:
    for refusal in run_on_ranks(2, outcome_on_one_gpu, device="simcuda"):
        assert refusal == (
            "ranks 0 and 1 use the same GPU (GPU-5), and NCCL needs one for each rank; start one rank per GPU, and "
            "call launch_from_torch or torch.cuda.set_device(LOCAL_RANK) first"
        )


# ----- flash-attn -----


def outcomes_with_package(directory: str, capability: tuple[int, int] | None) -> list[tuple[str, list[str]]]:
    """With a package of flash-attn in a directory: asked for as what fits, and by its name."""
    with mock.patch.object(sys, "path", [directory, *sys.path]):
        importlib.invalidate_caches()
        try:
            options = {"tp_size": 2, "precision": "bf16"}
            return [
                outcome(capability, {**options, "enable_flash_attention": asked})
                for asked in (True, "flash_attention_2")
            ]
        finally:
            sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize(
    ("content", "capability", "reason"),
    [
        (_BROKEN["import"], None, "cannot be imported (flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E); "),
        (_BROKEN["library"], None, "cannot be imported (libcudart.so.11.0: cannot open shared object file); "),
        ("", TURING, "needs a GPU of compute capability 8.0 (Ampere) or more, not 7.5"),
    ],
    ids=["another torch", "another CUDA", "an old GPU"],
)
def test_flash_attn_that_does_not_fit(
    content: str, capability: tuple[int, int] | None, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(content)
    arguments = str(tmp_path), capability
    for (fell_back, lines), (refused, _) in run_on_ranks(2, outcomes_with_package, *arguments, device="simcuda"):
        assert not fell_back
        (line,) = [each for each in lines if "flash_attention_2" in each]
        assert line.startswith(f"LlamaForCausalLM runs torch's SDPA: flash_attention_2 {reason}")
        assert refused.startswith(f"enable_flash_attention='flash_attention_2' {reason}"), refused
        assert refused.endswith("; use True or 'sdpa'") and "\n" not in refused
