"""The attention backend of each part of a model: what the part needs, and setting the backend chosen for it."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import nn

from shardformer.attention.backend import SDPA, AttentionNeeds, capability_of, log_once
from shardformer.attention.backends import choose_backend
from shardformer.attention.registry import name_kernels, uses_registry

# Names of the dropout of attention weights and of the size of a head, in configurations and modules of transformers.
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout", "dropout_rate")
_HEAD_DIMS = ("head_dim", "attention_head_size", "qk_head_dim", "v_head_dim")


def use_backend(
    model: nn.Module, request: bool | str, device: torch.device, dtype: torch.dtype, trains: bool = True
) -> None:
    """Set the backend of every attention of `model` that goes through transformers' registry; log slow ones.

    Args:
        request: True for the fastest backend that fits, or the name of one.
        device, dtype: what the model will run on and in.
        trains: whether dropout will be active.

    Raises:
        ValueError: see `choose_backend`.
    """
    name, found = type(model).__name__, list(_configured(model))
    chosen = []
    for config, modules in found:
        backend = choose_backend(request, needs_of(model, config, modules, device, dtype, trains))
        if backend.implementation is None:
            log_once(name, f"keeps its own attention: {backend.reason}")
        elif backend.reason:
            runs = "torch's SDPA" if backend.implementation == SDPA else backend.implementation
            log_once(name, f"runs {runs}: {backend.reason}")
        chosen.append(backend.implementation or config._attn_implementation)
    name_kernels(model, zip([config for config, _ in found], chosen, strict=True))
    if not found:
        log_once(name, "keeps its own attention: it is written out in the model's modules")


def _configured(model: nn.Module) -> Iterator[tuple[Any, list[nn.Module]]]:
    """Yield each configuration that names a kernel, with the modules that read it, outer configurations first."""
    readers: dict[int, tuple[Any, list[nn.Module]]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None and uses_registry(module):
            readers.setdefault(id(config), (config, []))[1].append(module)
    yield from readers.values()


def needs_of(
    model: nn.Module, config: Any, modules: list[nn.Module], device: torch.device, dtype: torch.dtype, trains: bool
) -> AttentionNeeds:
    """Return what the attentions that read one configuration need.

    Args:
        config: the configuration.
        modules: the modules that read it; those that are models of transformers declare what they support.
    """
    routed = all(getattr(module, "attends_by_registry", False) for module in modules)  # what the model says is its own
    owners = [*([] if routed else [model]), *(module for module in modules if hasattr(module, "_supports_sdpa"))]
    restricted = [getattr(owner, "_compatible_flash_implementations", None) for owner in owners]
    return AttentionNeeds(
        supports_flash=all(getattr(owner, "_supports_flash_attn", False) for owner in owners),
        supports_sdpa=all(getattr(owner, "_supports_sdpa", False) for owner in owners),
        flash_kernels=next((tuple(names) for names in restricted if names is not None), None),
        takes_arguments=any(each.kind is each.VAR_KEYWORD for each in signature(model.forward).parameters.values()),
        soft_caps=getattr(config, "attn_logit_softcapping", None) is not None,
        dropout=max((_number(config, name) for name in _DROPOUTS), default=0.0) if trains else 0.0,
        head_dims=_head_dims(config, modules),
        device=device.type,
        capability=capability_of(device),
        dtype=dtype,
    )


def _head_dims(config: Any, modules: list[nn.Module]) -> tuple[int, ...]:
    """Return the sizes of heads that the modules name; if they name none, that of the configuration."""
    named = {int(_number(module, name)) for module in modules for name in _HEAD_DIMS} - {0}
    if not named:
        heads = _number(config, "num_attention_heads")
        size = _number(config, "head_dim") or (_number(config, "hidden_size") // heads if heads else 0)
        named = {int(size)} - {0}
    return tuple(sorted(named))


def _number(owner: Any, name: str) -> float:
    value = getattr(owner, name, None)
    return value if isinstance(value, int | float) else 0
