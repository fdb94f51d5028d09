"""The attention backends, and the choice among them for a model."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardformer.attention.backend import (
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    SDPA_FAST,
    AttentionBackend,
    AttentionNeeds,
    slow_inputs,
)
from shardformer.attention.varlen import FLASH_VARLEN
from shardformer.attention.xformers import XFORMERS

# The first that is there and serves the model is the fastest; SDPA serves all that have a path for it.
_FLASH = (FLASH_ATTENTION_3, FLASH_ATTENTION_4, FLASH_ATTENTION_2, FLASH_VARLEN)
BACKENDS: tuple[AttentionBackend, ...] = (*_FLASH, XFORMERS, SDPA_FAST)
NAMES = tuple(backend.name for backend in BACKENDS)
_BY_NAME = {backend.name: backend for backend in BACKENDS}
_BY_ENTRY = {backend.entry or backend.name: backend for backend in BACKENDS}


@dataclass(frozen=True)
class Choice:
    """The attention kernel of a model.

    Attributes:
        implementation: name in the attention registry; None to keep the model's own.
        reason: why no faster backend was chosen, for the log; empty if there is no reason to log.
    """

    implementation: str | None
    reason: str = ""


def backend_of(entry: str) -> AttentionBackend | None:
    """Return the backend with a name in the attention registry; None if it is a kernel of transformers alone."""
    return _BY_ENTRY.get(entry)


def is_installed(name: str) -> bool:
    """Return whether the package of a backend is installed; torch always is."""
    backend = _BY_NAME[name]
    if backend.distribution and not list(importlib.metadata.Distribution.discover(name=backend.distribution)):
        return False
    return importlib.util.find_spec(backend.package) is not None


def reason_not_usable(name: str) -> str:
    """Return why the installed package of a backend cannot be used, as the rest of a sentence; empty if it can."""
    backend = _BY_NAME[name]
    try:
        importlib.import_module(backend.package)
    except (ImportError, OSError) as error:  # built for another torch or CUDA: undefined symbols, missing libraries
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"cannot be imported ({first_line}); install a build for torch {torch.__version__}"
    return backend.not_usable()


def choose_backend(
    request: bool | str,
    needs: AttentionNeeds,
    installed: Callable[[str], bool] = is_installed,
    not_usable: Callable[[str], str] = reason_not_usable,
) -> Choice:
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
        return Choice(_BY_NAME[request].entry or request)
    passed_over = []
    for backend in BACKENDS if needs.device == "cuda" else ():
        if not backend.is_automatic or backend is SDPA_FAST or not installed(backend.name):
            continue
        reason = backend.limits(needs) or not_usable(backend.name)
        if not reason:
            return Choice(backend.name, "; ".join(passed_over))
        if backend.is_optional:  # it was installed to be used
            passed_over.append(f"{backend.name} {reason}")
    if needs.soft_caps:
        capped = "its attention scores are soft-capped, which only flash-attn and its own code do"
        return Choice(None, "; ".join([capped, *passed_over]))
    if not needs.supports_sdpa:
        return Choice(None, "; ".join(["transformers has no SDPA path for it", *passed_over]))
    return Choice(SDPA_FAST.entry, "; ".join(passed_over))


def _check_named(
    name: str, needs: AttentionNeeds, installed: Callable[[str], bool], not_usable: Callable[[str], str]
) -> None:
    wanted = f"enable_flash_attention='{name}'"
    if name not in NAMES:
        raise ValueError(f"{wanted} is not an attention backend; use True, False or one of {', '.join(NAMES)}")
    backend = _BY_NAME[name]
    if not installed(name):
        raise ValueError(f"{wanted} needs the package {backend.package}, which is not installed; use True or 'sdpa'")
    if reason := backend.limits(needs) or not_usable(name):
        raise ValueError(f"{wanted} {reason}; use True or 'sdpa'")
    if needs.soft_caps and backend.is_like_sdpa:
        raise ValueError(f"{wanted} cannot cap attention scores, which the model needs; use True or False")
    if not needs.supports_sdpa and backend.is_like_sdpa:  # attention sinks, which SDPA would ignore
        raise ValueError(f"{wanted} cannot do what the model's attention needs; use True or False")


def keeps_scores(implementation: str, query: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> bool:
    """Return whether the named kernel keeps scores [batch, heads, seq, seq] for its backward pass on such inputs."""
    if implementation in ("sdpa", SDPA_FAST.entry):
        return bool(slow_inputs(query, attention_mask, **kwargs))
    return (
        backend_of(implementation) is None
        and not implementation.startswith(("context_", "flex"))
        and ("flash" not in implementation)
    )
