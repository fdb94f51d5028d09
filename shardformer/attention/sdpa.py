"""torch's SDPA, which chooses among its flash, cuDNN, memory-efficient and plain kernels; only the plain one is logged.

It gets padding, causal, windowed and cross-attention masks, ALiBi and relative biases as transformers builds them.
Grouped heads are repeated only if a mask keeps SDPA's kernels from taking them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardformer.attention.backend import AMPERE, SDPA, AttentionBackend, Capability, capability_of, log_once


def slow_reason(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    has_mask: bool,
    mask_needs_grad: bool,
    dropout: float = 0.0,
    capability: Capability | None = None,
) -> str:
    """Return why SDPA will run its plain kernel on such inputs; empty if a fused kernel takes them."""
    if mask_needs_grad:
        return "the bias on attention scores needs a gradient, which torch's fused kernels do not compute"
    if device == "cpu" and dropout:
        return "torch's fused kernel for CPUs has no dropout"
    if device == "cpu":
        return "" if dtype.is_floating_point else f"torch has no fused kernel for {dtype} on CPUs"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"torch has no fused kernel for {dtype} on {device}"
    if dtype == torch.bfloat16 and capability is not None and capability < AMPERE:
        return f"torch's fused kernels take {dtype} on GPUs of compute capability 8.0 (Ampere) or more"
    if head_dim > 256:
        return f"torch's fused kernels take head sizes up to 256, not {head_dim}"
    if dtype == torch.float32 and has_mask and head_dim % 4:
        return f"torch's memory-efficient kernel takes head sizes that 4 divides, not {head_dim}"
    return ""


def sdpa_without_slow_kernels(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call transformers' SDPA; log once per module class if no fused kernel takes its inputs."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if reason := slow_inputs(query, attention_mask, **kwargs):
        log_once(type(module).__name__, f"runs SDPA's plain kernel: {reason}")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def slow_inputs(
    query: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> str:
    """Return why SDPA will run its plain kernel on these inputs; empty if a fused kernel takes them."""
    masks = [mask for mask in (attention_mask, position_bias) if mask is not None]
    needs_grad = torch.is_grad_enabled() and any(mask.requires_grad for mask in masks)
    capability = capability_of(query.device)
    return slow_reason(query.device.type, query.dtype, query.shape[-1], len(masks) > 0, needs_grad, dropout, capability)


SDPA_FAST = AttentionBackend(
    name="sdpa", entry=SDPA, kernel=sdpa_without_slow_kernels, masks="sdpa", is_automatic=True, is_like_sdpa=True
)
