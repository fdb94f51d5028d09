"""AttentionBackend: what this package has to know of a kernel. `backends.py` lists them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardformer.utils.untraced import constant_in_graphs

HALF = (torch.float16, torch.bfloat16)
AMPERE, HOPPER = (8, 0), (9, 0)
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
