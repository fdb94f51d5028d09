"""Limits of the attention kernels of optional packages: the GPUs, dtypes, head sizes and features that they serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLASH_3, FLASH_2, XFORMERS = "flash_attention_3", "flash_attention_2", "xformers"
HALF = (torch.float16, torch.bfloat16)
AMPERE, HOPPER = (8, 0), (9, 0)
_LARGEST_FLASH_HEAD = 256
_BYTES_OF_LOAD = 16  # what one vector load of the CUTLASS kernels reads

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What the attention of a model needs from its kernel.

    Attributes:
        supports_flash, supports_sdpa: what the model's class declares (a bias on scores excludes flash-attn).
        flash_kernels: the flash kernels that the class is restricted to (attention sinks); None for any.
        soft_caps: whether scores are soft-capped (Gemma 2), which SDPA silently ignores.
        dropout: probability that training drops an attention weight; 0.0 for none.
        head_dims: the sizes of heads; empty if unknown.
        device: type of the device that the model will run on.
        capability: compute capability of that GPU, (major, minor); None if unknown.
        dtype: dtype that the model will run in.
    """

    supports_flash: bool
    supports_sdpa: bool
    flash_kernels: tuple[str, ...] | None = None
    soft_caps: bool = False
    dropout: float = 0.0
    head_dims: tuple[int, ...] = ()
    device: str
    capability: Capability | None = None
    dtype: torch.dtype


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of a GPU, (major, minor); None if there is none here."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def reason_not_served(name: str, needs: AttentionNeeds) -> str:
    """Return why the named kernel does not serve a model, as the rest of a sentence; empty if it does."""
    if name in (FLASH_3, FLASH_2):
        return _not_served_by_flash(name, needs)
    return _not_served_by_xformers(needs) if name == XFORMERS else ""


def _not_served_by_flash(name: str, needs: AttentionNeeds) -> str:
    if needs.device != "cuda" or needs.dtype not in HALF:
        return f"runs on GPUs in 16 bit, not on {needs.device} in {needs.dtype}"
    is_excluded = needs.flash_kernels is not None and name not in needs.flash_kernels
    if not needs.supports_flash or is_excluded:
        return "cannot do what the model's masks or biases need"
    if reason := _wrong_gpu(name, needs.capability):
        return reason
    if needs.dropout and name == FLASH_3:
        return f"has no dropout, and the model drops attention weights with probability {needs.dropout}"
    if needs.dropout and needs.soft_caps:
        return f"cannot both cap scores and drop attention weights with probability {needs.dropout}"
    for size in needs.head_dims:
        if size > _LARGEST_FLASH_HEAD:
            return f"takes head sizes up to {_LARGEST_FLASH_HEAD}, not {size}"
        if name == FLASH_3 and size % 8:  # flash-attn 2 pads heads itself
            return f"takes head sizes that 8 divides, not {size}"
        if not has_backward_of_large_heads(size, needs.capability, needs.dropout):
            return f"has no backward pass for heads of size {size} on a GPU of compute capability {_named(needs)}"
    return ""


def _wrong_gpu(name: str, capability: Capability | None) -> str:
    """Check the GPU: kernels for Hopper (sm90a) run on no later GPU, those for Ampere run on later ones."""
    if capability is None:
        return ""
    found = ".".join(map(str, capability))
    if name == FLASH_3 and capability[0] != HOPPER[0]:
        return f"needs a GPU of compute capability 9.0 (Hopper), not {found}"
    if capability < AMPERE:
        return f"needs a GPU of compute capability 8.0 (Ampere) or more, not {found}"
    return ""


def has_backward_of_large_heads(size: int, capability: Capability | None, dropout: float = 0.0) -> bool:
    """Return whether flash kernels have a backward pass for a head size: shared memory limits that of large heads.

    Up to 192 all GPUs have one; above 224 without dropout too; the rest only the GPUs of data centers, 8.0 and 9.0.
    """
    is_large = 192 < size <= 224 or (size > 224 and bool(dropout))
    return not is_large or capability in (None, AMPERE, HOPPER)


def _named(needs: AttentionNeeds) -> str:
    return ".".join(map(str, needs.capability or ()))


def _not_served_by_xformers(needs: AttentionNeeds) -> str:
    if needs.device != "cuda" or needs.dtype not in (*HALF, torch.float32):
        return f"runs on GPUs in fp32, fp16 or bf16, not on {needs.device} in {needs.dtype}"
    if needs.dtype == torch.bfloat16 and needs.capability is not None and needs.capability < AMPERE:
        return f"needs a GPU of compute capability 8.0 (Ampere) or more for bf16, not {_named(needs)}"
    step = _BYTES_OF_LOAD // needs.dtype.itemsize
    for size in needs.head_dims:
        if size % step:
            return f"takes head sizes that {step} divides in {needs.dtype}, not {size}"
    return ""
