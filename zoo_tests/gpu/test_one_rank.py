"""Each path of one rank on a GPU: losses of three steps are those of plain torch on the same GPU.

Both run in fp32 without TF32, so that what remains is the order of sums in other kernels: `FP32` is ten times what
fp32 loses over three steps of AdamW. In 16 and 8 bit the tolerance is about the rounding of the dtype.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardformer.attention.backend import reason_not_usable
from zoo_tests.gpu import device
from zoo_tests.gpu.training import (
    FAMILIES,
    FP32,
    Training,
    batch,
    build,
    generate,
    needs_real_gpu,
    on_ranks,
    resume,
    train,
    train_plainly,
)

BF16, FP8 = 2e-2, 5e-2
# Also what a package that is installed computes: Liger's and apex's norms, kernels that Triton compiles.
OPTIONS: dict[str, dict[str, Any]] = {
    "recompute all layers": {"gradient_checkpointing": "full"},
    "recompute half of the layers": {"gradient_checkpointing": 0.5},
    "recompute attention": {"gradient_checkpointing": "selective"},
    "fused norms": {"enable_fused_normalization": True},
    "fused operators": {"enable_jit_fused": True},
    "all optimisations": {"enable_all_optimization": True},
    "micro-batches": {"num_microbatches": 4},
    "LoRA": {"adapters": True},
    "no ZeRO": {"zero_stage": 0},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
    "states in the memory of the host": {"offload_optimizer": "cpu"},
    "activations in the memory of the host": {"offload_activations": "cpu"},
    "all in the memory of the host": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "compiled layers": {"compile_layers": True},
    "compiled layers, recomputed": {"compile_layers": True, "gradient_checkpointing": "full"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32(family: str) -> None:
    ((losses, plain),) = on_ranks(1, train, family, {})
    assert losses == pytest.approx(plain, rel=FP32)


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str) -> None:
    if "compile_layers" in OPTIONS[name] and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    needs_real_gpu(OPTIONS[name])
    ((losses, plain),) = on_ranks(1, train, "llama", OPTIONS[name])
    assert losses == pytest.approx(plain, rel=FP32)


def test_bf16() -> None:
    ((losses, plain),) = on_ranks(1, train, "llama", {"precision": "bf16"})
    assert losses == pytest.approx(plain, rel=BF16)


def test_fp8() -> None:
    if device.capability() < (8, 9):
        pytest.skip(f"products in 8 bit need compute capability 8.9, and this GPU has {device.capability()}")
    ((losses, plain),) = on_ranks(1, train, "llama", {"precision": "fp8"})
    assert losses == pytest.approx(plain, rel=FP8)


def waits(options: dict[str, Any]) -> list[str]:
    """Where the host waited for the GPU in a step of batches that are there already; torch names the lines."""
    training = Training("llama", **options)
    batches = [{"input_ids": (ids := batch(step)["input_ids"].cuda()), "labels": ids} for step in range(2)]
    for each in batches:
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True, action="always") as said:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                training.booster.execute_pipeline(
                    iter([each]), training.model, optimizer=training.optimizer, return_loss=False
                )
                training.optimizer.step()
                training.optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in said if "synchronizing CUDA" in str(each.message)]


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16"}, {}], ids=["bf16", "fp16", "fp32"])
def test_the_host_waits_once(options: dict[str, Any]) -> None:
    """For whether the gradients are finite; `cuda_trace` finds the same on fake tensors."""
    if device.chosen() != device.GPU:
        pytest.skip("the simulated device has no such mode of debugging")
    (found,) = on_ranks(1, waits, options)
    ours = [line for line in found if "/transformers/" not in line]
    assert len(ours) == 1 and "zero/bucket_layout.py" in ours[0], found


def overflow() -> tuple[list[float], list[float]]:
    """Losses of steps that overflow, whose loss scale shrinks, and of those after them."""
    training, skipped, losses = Training("llama", precision="fp16", initial_scale=2.0**40), [], []
    while not losses:
        before = training.optimizer.loss_scale.value
        loss = training.step(0)
        (skipped if training.optimizer.loss_scale.value < before else losses).append(loss)
    return skipped, losses + training.train(1)


def test_fp16_with_overflow() -> None:
    """Steps at too large a loss scale change no weight."""
    ((skipped, losses),) = on_ranks(1, overflow)
    ((_, plain),) = on_ranks(1, train, "llama", {})
    assert skipped == pytest.approx(len(skipped) * plain[:1], rel=BF16) and skipped
    assert losses == pytest.approx(plain, rel=BF16)


def train_lazily(directory: str) -> tuple[list[float], list[float]]:
    """Losses of a model that is read only after it is sharded, and of plain training."""
    build("llama").save_pretrained(directory)
    return Training("llama", directory=directory).train(), train_plainly("llama")


def test_lazy_initialisation(tmp_path: Path) -> None:
    ((losses, plain),) = on_ranks(1, train_lazily, str(tmp_path))
    assert losses == pytest.approx(plain, rel=FP32)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_checkpoint(asynchronous: bool, tmp_path: Path) -> None:
    ((went_on, resumed),) = on_ranks(1, resume, str(tmp_path / "saved"), {}, {}, asynchronous)
    assert went_on == resumed


def test_generate() -> None:
    ((tokens, plain),) = on_ranks(1, generate, {})
    assert tokens == plain


@pytest.mark.parametrize(
    ("kernel", "package"),
    [
        ("sdpa", "torch"),
        ("flash_attention_2", "flash_attn"),
        ("flash_attention_3", "flash_attn_interface"),
        ("xformers", "xformers"),
    ],
)
def test_attention_kernel(kernel: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if reason := reason_not_usable(kernel):
        pytest.skip(f"{package} {reason}")
    ((losses, plain),) = on_ranks(1, train, "llama", {"precision": "bf16", "enable_flash_attention": kernel})
    assert losses == pytest.approx(plain, rel=BF16)
