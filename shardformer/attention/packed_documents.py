"""Packed documents: several documents in one row, marked by `position_ids` that restart.

transformers keeps them apart only if it gets no mask and fills no cache. With `use_cache=True`, the default of most
configurations, they see each other. The sharded model does the same as the plain model on every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.attention import log_once


def may_be_packed(inputs: Mapping[str, Any]) -> bool:
    """Return whether transformers would look for packed documents in the inputs of a model."""
    return inputs.get("position_ids") is not None and inputs.get("attention_mask") is None


def _fills_cache(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the base model fills a cache: the inputs decide, then the configuration."""
    asked = inputs.get("use_cache")
    asked = getattr(getattr(model, "config", None), "use_cache", False) if asked is None else asked
    return bool(asked) and not (getattr(model, "gradient_checkpointing", False) and model.training)


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs for a pass without a cache in which tokens see what they see in a pass that may fill one."""
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
    base = getattr(model, "base_model", model)
    if tokens is None or not may_be_packed(inputs) or not _fills_cache(base, inputs):
        return {**inputs, "use_cache": False}
    # Given a mask, transformers does not look for packed documents either.
    mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return {**inputs, "use_cache": False, "attention_mask": mask}


def start_again(positions: Tensor) -> bool:
    """Return whether positions, [batch or 1, seq], restart within a row."""
    return bool(restart_flag(positions))


def restart_flag(positions: Tensor) -> Tensor:
    """Return whether positions, [batch or 1, seq], restart within a row, as a bool tensor (0-d)."""
    if positions.dim() != 2:
        return torch.zeros((), dtype=torch.bool)
    return (positions.diff(dim=-1) != 1).any()


def tell_of_packed_documents(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Warn, in the first pass with positions, that a cache lets packed documents see each other."""
    if not may_be_packed(inputs) or getattr(model, "packed_documents_told", False):
        return
    model.packed_documents_told = True
    base = getattr(model, "base_model", model)
    if torch.is_grad_enabled() and _fills_cache(base, inputs) and start_again(inputs["position_ids"]):
        log_once(
            type(model).__name__,
            "lets documents that are packed into a row see each other, as transformers does where it fills a cache; "
            "give use_cache=False in the batch, or set model.config.use_cache = False, to keep them apart",
        )
