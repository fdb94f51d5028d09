"""Attention backends: choose the kernel for a model, and log a warning when a slow kernel runs.

flash-attn runs if it is installed, the model is a transformers model that supports it, and tensors are on a GPU in
16 bit. Otherwise torch's SDPA runs, which chooses among its flash, cuDNN, memory-efficient and plain kernels; only the
plain one is logged. SDPA gets padding, causal, windowed and cross-attention masks, ALiBi and relative biases as
transformers builds them. Grouped heads are repeated only if a mask keeps SDPA's kernels from taking them.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

SDPA = "sdpa_fast"  # transformers' SDPA, plus a check of which kernel it gets
_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn", "xformers": "xformers"}
NAMES = (*_PACKAGES, "sdpa")


@dataclass(frozen=True)
class Backend:
    """Attention backend of a model.

    Attributes:
        implementation: name in the attention registry; None to keep the model's own.
        reason: why no faster backend was chosen, for the log; empty if there is no reason to log.
    """

    implementation: str | None
    reason: str = ""


def is_installed(name: str) -> bool:
    """Return whether the package of a backend is installed; SDPA always is."""
    return name not in _PACKAGES or importlib.util.find_spec(_PACKAGES[name]) is not None


def choose_backend(
    request: bool | str,
    *,
    supports_flash: bool,
    supports_sdpa: bool,
    soft_caps: bool,
    device: str,
    dtype: torch.dtype,
    installed: Callable[[str], bool] = is_installed,
) -> Backend:
    """Choose the attention backend of a model.

    Args:
        request: True for the fastest backend that fits, or the name of one.
        supports_flash, supports_sdpa: what the model's class declares (a bias on scores excludes flash-attn).
        soft_caps: whether scores are soft-capped (Gemma 2), which SDPA silently ignores.
        device, dtype: device type and dtype that the model will run in.

    Raises:
        ValueError: the named backend is unknown, not installed, or cannot do what the model needs.
    """
    if isinstance(request, str):
        _check_named(request, supports_flash, soft_caps, device, dtype, installed)
        return Backend(SDPA if request == "sdpa" else request)
    fits_flash = supports_flash and device == "cuda" and dtype in (torch.float16, torch.bfloat16)
    for name in ("flash_attention_3", "flash_attention_2"):
        if fits_flash and installed(name):
            return Backend(name)
    if soft_caps:
        return Backend(None, "its attention scores are soft-capped, which only flash-attn and its own code do")
    if not supports_sdpa:
        return Backend(None, "transformers has no SDPA path for it")
    return Backend(SDPA)


def _check_named(
    name: str,
    supports_flash: bool,
    soft_caps: bool,
    device: str,
    dtype: torch.dtype,
    installed: Callable[[str], bool],
) -> None:
    wanted = f"enable_flash_attention='{name}'"
    if name not in NAMES:
        raise ValueError(f"{wanted} is not an attention backend; use True, False or one of {', '.join(NAMES)}")
    if not installed(name):
        raise ValueError(f"{wanted} needs the package {_PACKAGES[name]}, which is not installed; use True or 'sdpa'")
    if name.startswith("flash") and (device != "cuda" or dtype not in (torch.float16, torch.bfloat16)):
        raise ValueError(f"{wanted} runs on GPUs in 16 bit, not on {device} in {dtype}; use True or 'sdpa'")
    if name.startswith("flash") and not supports_flash:
        raise ValueError(f"{wanted} cannot do what the model's masks or biases need; use True or 'sdpa'")
    if soft_caps and not name.startswith("flash"):
        raise ValueError(f"{wanted} cannot cap attention scores, which the model needs; use True or False")


@cache
def log_once(name: str, what: str) -> None:
    """Log a warning, once per process."""
    _log.warning("%s %s", name, what)


def slow_reason(
    device: str, dtype: torch.dtype, head_dim: int, has_mask: bool, mask_needs_grad: bool, dropout: float = 0.0
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

    if reason := _slow_inputs(query, attention_mask, **kwargs):
        log_once(type(module).__name__, f"runs SDPA's plain kernel: {reason}")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def keeps_scores(implementation: str, query: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> bool:
    """Return whether the named kernel keeps scores [batch, heads, seq, seq] for its backward pass on such inputs."""
    if implementation.startswith("context_"):
        return False
    if implementation in ("sdpa", SDPA):
        return bool(_slow_inputs(query, attention_mask, **kwargs))
    return not implementation.startswith(("flash", "flex")) and implementation != "xformers"


def _slow_inputs(
    query: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> str:
    masks = [mask for mask in (attention_mask, position_bias) if mask is not None]
    needs_grad = torch.is_grad_enabled() and any(mask.requires_grad for mask in masks)
    return slow_reason(query.device.type, query.dtype, query.shape[-1], bool(masks), needs_grad, dropout)


def xformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run xformers' memory-efficient attention; query, key, value: [batch, heads, seq, head_dim]."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    bias: Any = LowerTriangularMask() if attention_mask is None and causal and query.shape[2] > 1 else None
    for mask in (attention_mask, kwargs.get("position_bias")):
        if mask is not None:
            bias = _additive(mask, query) if bias is None else bias + _additive(mask, query)
    heads_last = [x.transpose(1, 2) for x in (query, key, value)]
    return memory_efficient_attention(*heads_last, attn_bias=bias, p=dropout, scale=scaling), None


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """Convert a mask or bias to an additive one, [batch, heads, seq, seq], in the query's dtype."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return mask.to(query.dtype).expand(query.shape[0], query.shape[1], -1, -1)
