"""AttentionBackend: what this package has to know of a kernel; and those that transformers calls itself.

They are flash-attn 2 and 3, and torch's SDPA, which chooses among its flash, cuDNN, memory-efficient and plain kernels;
only the plain one is logged. SDPA gets padding, causal, windowed and cross-attention masks, ALiBi and relative biases
as transformers builds them. Grouped heads are repeated only if a mask keeps its kernels from taking them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.utils.untraced import constant_in_graphs

HALF = (torch.float16, torch.bfloat16)
AMPERE, HOPPER = (8, 0), (9, 0)
FLASH_4, FLASH_3, FLASH_2 = "flash_attention_4", "flash_attention_3", "flash_attention_2"
FLASH_4_HEADS = (64, 96, 128)
LARGEST_HEAD = 256
SDPA = "sdpa_fast"  # transformers' SDPA, plus a check of which kernel it gets

_log = logging.getLogger("shardformer.attention.backends")

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What the attention of a model needs from its kernel.

    Attributes:
        supports_flash, supports_sdpa: what the model's class declares (a bias on scores excludes flash-attn).
        flash_kernels: the flash kernels that the class is restricted to (attention sinks); None for any.
        takes_arguments: whether the model hands arguments that it does not know on to its attention.
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
    takes_arguments: bool = True
    soft_caps: bool = False
    dropout: float = 0.0
    head_dims: tuple[int, ...] = ()
    device: str
    capability: Capability | None = None
    dtype: torch.dtype

    @property
    def gpu(self) -> str:
        """The compute capability of the GPU, as people write it."""
        return ".".join(map(str, self.capability or ()))


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """One kernel.

    Attributes:
        name: as a value of `enable_flash_attention`.
        package: the module that must be there.
        distribution: what it must be of, where several have that module; empty for any.
        limits: needs -> why it does not serve a model, as the rest of a sentence; empty if it does.
        not_usable: () -> why the package cannot be used though it is there; empty if it can.
        entry: its name in the registries; that of the backend if empty.
        kernel: the function for the registry of kernels; None if transformers has one under the name.
        masks: the function for the registry of masks, or the name of the kernel whose masks it takes; None if
            transformers has one under the name.
        is_automatic: whether `enable_flash_attention=True` may choose it.
        is_like_sdpa: whether it does what SDPA does: no caps of scores, and only models that have an SDPA path.
    """

    name: str
    package: str = "torch"
    distribution: str = ""
    limits: Callable[[AttentionNeeds], str] = lambda needs: ""
    not_usable: Callable[[], str] = lambda: ""
    entry: str = ""
    kernel: Callable[..., Any] | None = None
    masks: Callable[..., Any] | str | None = None
    is_automatic: bool = False
    is_like_sdpa: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether it is a package of its own."""
        return self.package.partition(".")[0] != "torch"


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of a GPU, (major, minor); None if there is none here."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def has_backward_of_large_heads(size: int, capability: Capability | None, dropout: float = 0.0) -> bool:
    """Return whether flash kernels have a backward pass for a head size: shared memory limits that of large heads.

    Up to 192 all GPUs have one; above 224 without dropout too; the rest only the GPUs of data centers, 8.0 and 9.0.
    """
    is_large = 192 < size <= 224 or (size > 224 and bool(dropout))
    return not is_large or capability in (None, AMPERE, HOPPER)


@constant_in_graphs
def log_once(name: str, what: str) -> None:
    """Log a warning, once per process; not while logging is switched off."""
    if _log.isEnabledFor(logging.WARNING):
        _log_once(name, what)


@cache
def _log_once(name: str, what: str) -> None:
    _log.warning("%s %s", name, what)


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
    if name == FLASH_4 and needs.capability is not None and needs.capability < HOPPER:
        return f"needs a GPU of compute capability 9.0 (Hopper) or more, not {needs.gpu}"
    if name == FLASH_4 and needs.soft_caps:
        return "has no backward pass for soft-capped scores"
    if needs.capability is not None and needs.capability < AMPERE:
        return f"needs a GPU of compute capability 8.0 (Ampere) or more, not {needs.gpu}"
    if needs.dropout and name != FLASH_2:
        return f"has no dropout, and the model drops attention weights with probability {needs.dropout}"
    if needs.dropout and needs.soft_caps:
        return f"cannot both cap scores and drop attention weights with probability {needs.dropout}"
    for size in needs.head_dims:
        if name == FLASH_4 and size not in FLASH_4_HEADS:
            return f"takes head sizes {', '.join(map(str, FLASH_4_HEADS))}, not {size}"
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

    available = {
        FLASH_4: utils.is_flash_attn_4_available,
        FLASH_3: utils.is_flash_attn_3_available,
        FLASH_2: utils.is_flash_attn_2_available,
    }[name]
    return "" if available() else "is no version that transformers takes"


def _flash(name: str, package: str, distribution: str = "") -> AttentionBackend:
    limits, not_usable = partial(flash_limits, name), partial(_not_usable, name)
    return AttentionBackend(
        name=name,
        package=package,
        distribution=distribution,
        limits=limits,
        not_usable=not_usable,
        is_automatic=True,
    )


FLASH_ATTENTION_4 = _flash(FLASH_4, "flash_attn", "flash-attn-4")
FLASH_ATTENTION_3, FLASH_ATTENTION_2 = _flash(FLASH_3, "flash_attn_interface"), _flash(FLASH_2, "flash_attn")


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
