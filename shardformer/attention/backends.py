"""Attention backends: choose the kernel for a model, and log a warning when a slow kernel runs.

flash-attn runs if it is installed and serves the model (`kernel_limits`). Otherwise torch's SDPA runs, which chooses
among its flash, cuDNN, memory-efficient and plain kernels; only the plain one is logged. SDPA gets padding, causal,
windowed and cross-attention masks, ALiBi and relative biases as transformers builds them. Grouped heads are repeated
only if a mask keeps SDPA's kernels from taking them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.attention.kernel_limits import (
    AMPERE,
    FLASH_2,
    FLASH_3,
    XFORMERS,
    AttentionNeeds,
    Capability,
    capability_of,
    reason_not_served,
)
from shardformer.utils.untraced import constant_in_graphs

_log = logging.getLogger(__name__)

SDPA = "sdpa_fast"  # transformers' SDPA, plus a check of which kernel it gets
_PACKAGES = {FLASH_3: "flash_attn_interface", FLASH_2: "flash_attn", XFORMERS: "xformers"}
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


def reason_not_usable(name: str) -> str:
    """Return why the installed package of a backend cannot be used, as the rest of a sentence; empty if it can."""
    if name not in _PACKAGES:
        return ""
    try:
        importlib.import_module(_PACKAGES[name])
    except (ImportError, OSError) as error:  # built for another torch or CUDA: undefined symbols, missing libraries
        return f"cannot be imported ({_first_line(error)}); install a build for torch {torch.__version__}"
    if name == XFORMERS:
        lacks = "has no kernels that load here (built for another torch or Python, or for CPUs)"
        return "" if _xformers_has_kernels() else f"{lacks}; install a build for torch {torch.__version__}"
    return "" if _is_known_to_transformers(name) else "is no version that transformers takes"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _xformers_has_kernels() -> bool:
    """Ask xformers, whose Python part can be imported without its kernels."""
    from xformers.ops.fmha import cutlass

    return bool(cutlass.FwOp.is_available())


def _is_known_to_transformers(name: str) -> bool:
    """Ask transformers, which otherwise looks for the kernel on the hub in the first forward pass."""
    from transformers import utils

    available = utils.is_flash_attn_3_available if name == FLASH_3 else utils.is_flash_attn_2_available
    return bool(available())


def choose_backend(
    request: bool | str,
    needs: AttentionNeeds,
    installed: Callable[[str], bool] = is_installed,
    not_usable: Callable[[str], str] = reason_not_usable,
) -> Backend:
    """Choose the attention backend of a model.

    Args:
        request: True for the fastest backend that fits, or the name of one.
        needs: what the model needs.
        installed: name -> whether its package is installed.
        not_usable: name -> why the installed package cannot be used; empty if it can.

    Raises:
        ValueError: the named backend is unknown, not installed, or cannot do what the model needs.
    """
    if isinstance(request, str):
        _check_named(request, needs, installed, not_usable)
        return Backend(SDPA if request == "sdpa" else request)
    passed_over = []
    for name in (FLASH_3, FLASH_2) if needs.device == "cuda" else ():
        if not installed(name):
            continue
        reason = reason_not_served(name, needs) or not_usable(name)
        if not reason:
            return Backend(name, "; ".join(passed_over))
        passed_over.append(f"{name} {reason}")
    if needs.soft_caps:
        capped = "its attention scores are soft-capped, which only flash-attn and its own code do"
        return Backend(None, "; ".join([capped, *passed_over]))
    if not needs.supports_sdpa:
        return Backend(None, "; ".join(["transformers has no SDPA path for it", *passed_over]))
    return Backend(SDPA, "; ".join(passed_over))


def _check_named(
    name: str, needs: AttentionNeeds, installed: Callable[[str], bool], not_usable: Callable[[str], str]
) -> None:
    wanted = f"enable_flash_attention='{name}'"
    if name not in NAMES:
        raise ValueError(f"{wanted} is not an attention backend; use True, False or one of {', '.join(NAMES)}")
    if not installed(name):
        raise ValueError(f"{wanted} needs the package {_PACKAGES[name]}, which is not installed; use True or 'sdpa'")
    if reason := reason_not_served(name, needs) or not_usable(name):
        raise ValueError(f"{wanted} {reason}; use True or 'sdpa'")
    if needs.soft_caps and not name.startswith("flash"):
        raise ValueError(f"{wanted} cannot cap attention scores, which the model needs; use True or False")
    if not needs.supports_sdpa and not name.startswith("flash"):  # attention sinks, which SDPA would ignore
        raise ValueError(f"{wanted} cannot do what the model's attention needs; use True or False")


@constant_in_graphs
def log_once(name: str, what: str) -> None:
    """Log a warning, once per process; not while logging is switched off."""
    if _log.isEnabledFor(logging.WARNING):
        _log_once(name, what)


@cache
def _log_once(name: str, what: str) -> None:
    _log.warning("%s %s", name, what)


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

    if reason := _slow_inputs(query, attention_mask, **kwargs):
        log_once(type(module).__name__, f"runs SDPA's plain kernel: {reason}")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def keeps_scores(implementation: str, query: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> bool:
    """Return whether the named kernel keeps scores [batch, heads, seq, seq] for its backward pass on such inputs."""
    if implementation.startswith("context_"):
        return False
    if implementation in ("sdpa", SDPA):
        return bool(_slow_inputs(query, attention_mask, **kwargs))
    return not implementation.startswith("flex") and "flash" not in implementation and implementation != XFORMERS


def _slow_inputs(
    query: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> str:
    masks = [mask for mask in (attention_mask, position_bias) if mask is not None]
    needs_grad = torch.is_grad_enabled() and any(mask.requires_grad for mask in masks)
    capability = capability_of(query.device)
    return slow_reason(query.device.type, query.dtype, query.shape[-1], len(masks) > 0, needs_grad, dropout, capability)
