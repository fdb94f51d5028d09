"""Kernels of transformers that read their own name from the configuration of the attention module.

transformers' flash attention passes `module.config._attn_implementation` on, to find the package that the name stands
for. In a sharded model that is the name under which this package registered its own function, so such a kernel gets a
module whose configuration has the kernel's own name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from shardformer.attention.backends import log_once
from shardformer.attention.kernel_limits import FLASH_2, FLASH_3

Kernel = Callable[..., Any]


def reads_its_name(implementation: str) -> bool:
    """Return whether the named kernel looks itself up by name: flash kernels and those of the hub (owner/kernel)."""
    return ("flash" in implementation or "/" in implementation) and not implementation.startswith("context_")


def under_its_name(kernel: Kernel, implementation: str) -> Kernel:
    """Return `kernel` for modules whose configuration may have another name than `implementation`."""
    return partial(_call, kernel, implementation)


def _call(kernel: Kernel, implementation: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if implementation == FLASH_3 and kwargs.get("dropout"):
        log_once(type(module).__name__, f"drops no attention weights: {FLASH_3} has no dropout; use {FLASH_2}")
    return kernel(View(module, config=View(module.config, _attn_implementation=implementation)), *args, **kwargs)


class View:
    """An object with some attributes replaced; the object itself stays as it is."""

    def __init__(self, viewed: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed"], name)
