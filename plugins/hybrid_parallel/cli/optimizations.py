"""Report which optimisations are available, by the same rules by which the library chooses its kernels."""

from __future__ import annotations

import importlib.util
import shutil


def optimisations() -> dict[str, str]:
    """Return name -> "available", or the fallback and what to install."""
    import torch
    import torch.distributed as dist

    from shardformer.attention.backends import is_installed
    from shardformer.layers.fused_ops import has_compiler
    from shardformer.layers.norm import LAYER_NORM_PACKAGES, RMS_NORM_PACKAGES, are_installed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    compiler = "triton" if device == "cuda" else "a C++ compiler (g++)"
    sdpa = "attention runs through torch's SDPA"
    rows = [
        ("flash-attn", is_installed("flash_attention_2"), sdpa, "flash-attn"),
        ("flash-attn 3", is_installed("flash_attention_3"), sdpa, "the hopper folder of flash-attn, for Hopper GPUs"),
        ("xformers", is_installed("xformers"), sdpa, "xformers"),
        (
            "apex",
            are_installed(LAYER_NORM_PACKAGES),
            "layer norms run through torch's kernel",
            "apex with its CUDA extensions",
        ),
        ("liger-kernel", are_installed(RMS_NORM_PACKAGES), "RMS norms run through torch's kernel", "liger-kernel"),
        ("fused operators", has_compiler(device), "enable_jit_fused runs eagerly", compiler),
        ("NCCL", dist.is_nccl_available(), "GPUs talk through gloo, by way of the CPU", "a build of torch for CUDA"),
        ("safetensors", _is_there("safetensors"), "weights cannot be read in slices", "safetensors"),
        ("torchrun", shutil.which("torchrun") is not None, "`booster run` starts jobs", "torch with its scripts"),
        ("matplotlib", _is_there("matplotlib"), "schedules are shown in text alone", "matplotlib"),
    ]
    found = {"attention here": _attention_here(device)}
    for name, there, without, what in rows:
        found[name] = "available" if there else f"missing: {without}; install {what}"
    return found


def _attention_here(device: str) -> str:
    """Return the attention kernel that a standard model gets in bf16."""
    import torch

    from shardformer.attention.backends import SDPA, choose_backend
    from shardformer.attention.kernel_limits import AttentionNeeds, capability_of

    needs = AttentionNeeds(
        supports_flash=True,
        supports_sdpa=True,
        device=device,
        capability=capability_of(torch.device(device)),
        dtype=torch.bfloat16,
    )
    chosen = choose_backend(True, needs)
    return "torch's SDPA" if chosen.implementation == SDPA else str(chosen.implementation)


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
