"""Fused norms in models that are sharded by a plan, which does not say what norms they have."""

from __future__ import annotations

from functools import cache

from torch import nn

from shardformer.layers import FusedLayerNorm, FusedRMSNorm
from shardformer.layers.parallel_module import ParallelModule
from shardformer.utils.customizations import carry_over, stored_weight, user_code
from shardformer.utils.forward_syntax import definer, parsed, statements_of
from shardformer.utils.module_paths import replace_module

_NORMALISED = (
    "input_dtype = hidden_states.dtype; hidden_states = hidden_states.to(torch.float32); "
    "variance = hidden_states.pow(2).mean(-1, keepdim=True); "
    "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon); "
)
_RMS_NORM = (  # of Llama, and of OLMo 2
    f"{_NORMALISED}return self.weight * hidden_states.to(input_dtype)",
    f"{_NORMALISED}return (self.weight * hidden_states).to(input_dtype)",
)
_OFFSET_RMS_NORM = (  # of Gemma: weights start at 0
    "output = self._norm(x.float()); output = output * (1.0 + self.weight.float()); return output.type_as(x)",
)


def fuse_norms(model: nn.Module) -> None:
    """Replace the norms of `model` whose classes compute a layer norm or a known RMS norm, in place."""
    for path, module in list(model.named_modules()):
        new = _fused(module)
        if new is not None and user_code(module) is None:
            carry_over(module, new)
            replace_module(model, path, new)


def _fused(module: nn.Module) -> ParallelModule | None:
    if type(module) is nn.LayerNorm:
        return FusedLayerNorm(module) if module.weight is not None else None
    offset = _offset_of(definer(type(module))) if stored_weight(module) is not None else None
    return FusedRMSNorm(module, offset) if offset is not None else None


@cache
def _offset_of(cls: type) -> float | None:
    """Return what a known RMS norm adds to its weight; None for another class."""
    statements = statements_of(cls)
    if statements in map(parsed, _RMS_NORM):
        return 0.0
    return 1.0 if statements in map(parsed, _OFFSET_RMS_NORM) else None
