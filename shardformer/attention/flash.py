"""flash-attn 2 and 3, which transformers calls."""

from __future__ import annotations

from functools import partial

from shardformer.attention.backend import (
    AMPERE,
    HALF,
    HOPPER,
    AttentionBackend,
    AttentionNeeds,
    has_backward_of_large_heads,
)

FLASH_3, FLASH_2 = "flash_attention_3", "flash_attention_2"
LARGEST_HEAD = 256


def flash_limits(name: str, needs: AttentionNeeds) -> str:
    """Return why flash-attn, or torch's copy of it, does not serve a model; empty if it does."""
    if needs.device != "cuda" or needs.dtype not in HALF:
        return f"runs on GPUs in 16 bit, not on {needs.device} in {needs.dtype}"
    is_excluded = needs.flash_kernels is not None and name not in needs.flash_kernels
    if not needs.supports_flash or is_excluded:
        return "cannot do what the model's masks or biases need"
    # Kernels for Hopper (sm90a) run on no later GPU, those for Ampere run on later ones.
    if name == FLASH_3 and needs.capability is not None and needs.capability[0] != HOPPER[0]:
        return f"needs a GPU of compute capability 9.0 (Hopper), not {needs.gpu}"
    if needs.capability is not None and needs.capability < AMPERE:
        return f"needs a GPU of compute capability 8.0 (Ampere) or more, not {needs.gpu}"
    if needs.dropout and name != FLASH_2:
        return f"has no dropout, and the model drops attention weights with probability {needs.dropout}"
    if needs.dropout and needs.soft_caps:
        return f"cannot both cap scores and drop attention weights with probability {needs.dropout}"
    for size in needs.head_dims:
        if size > LARGEST_HEAD:
            return f"takes head sizes up to {LARGEST_HEAD}, not {size}"
        if name != FLASH_2 and size % 8:  # flash-attn 2 pads heads itself
            return f"takes head sizes that 8 divides, not {size}"
        if not has_backward_of_large_heads(size, needs.capability, needs.dropout):
            return f"has no backward pass for heads of size {size} on a GPU of compute capability {needs.gpu}"
    return ""


def _not_usable(name: str) -> str:
    """Ask transformers, which otherwise looks for the kernel on the hub in the first forward pass."""
    from transformers import utils

    available = utils.is_flash_attn_3_available if name == FLASH_3 else utils.is_flash_attn_2_available
    return "" if available() else "is no version that transformers takes"


def _flash(name: str, package: str) -> AttentionBackend:
    limits, not_usable = partial(flash_limits, name), partial(_not_usable, name)
    return AttentionBackend(name=name, package=package, limits=limits, not_usable=not_usable, is_automatic=True)


FLASH_ATTENTION_3, FLASH_ATTENTION_2 = _flash(FLASH_3, "flash_attn_interface"), _flash(FLASH_2, "flash_attn")
