"""Normalization layers: fused kernels with equal results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.layers.parallel_module import ParallelModule

# Packages whose kernels replace torch's on GPUs.
LAYER_NORM_PACKAGE, RMS_NORM_PACKAGE = "apex", "liger_kernel"


class FusedLayerNorm(ParallelModule):
    """Layer norm over the last dim: apex's kernel on a GPU if apex is installed, else torch's (already fused)."""

    needs_axis = False
    can_stay_whole = True

    def __init__(self, native: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias = native.weight, native.bias
        self.normalized_shape, self.eps = native.normalized_shape, native.eps

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup) -> FusedLayerNorm:
        """Take over the parameters of an `nn.LayerNorm`, which stay whole on every rank."""
        return FusedLayerNorm(module)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim of `x`, [batch, seq, hidden]."""
        # Checked here, not at construction: the model moves to its device later.
        kernel = _apex_layer_norm() if x.is_cuda and self.bias is not None else None
        if kernel is None:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return kernel(x, self.weight, self.bias, self.normalized_shape, self.eps)


@cache
def _apex_layer_norm() -> Callable[..., Tensor] | None:
    if importlib.util.find_spec(LAYER_NORM_PACKAGE) is None:
        return None
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine


class FusedRMSNorm(ParallelModule):
    """RMS norm over the last dim (arXiv 1910.07467) in one kernel instead of six.

    Liger's kernel on a GPU if it is installed, else torch's.
    """

    needs_axis = False
    can_stay_whole = True

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.weight = native.weight
        self.variance_epsilon = native.variance_epsilon if hasattr(native, "variance_epsilon") else native.eps

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup) -> FusedRMSNorm:
        """Take over the weight of a Llama-style RMS norm, which stays whole on every rank."""
        return FusedRMSNorm(module)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim of `x`, [batch, seq, hidden]."""
        kernel = _liger_rms_norm() if x.is_cuda else None
        if kernel is None:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)
        return kernel(x, self.weight, self.variance_epsilon)


@cache
def _liger_rms_norm() -> Callable[..., Tensor] | None:
    if importlib.util.find_spec(RMS_NORM_PACKAGE) is None:
        return None
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply
