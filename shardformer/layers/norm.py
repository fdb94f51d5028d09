"""Normalization layers: fused kernels with equal results; and dropout with a random stream for each rank."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.blocks import rank_of_draws
from shardformer.distributed.collectives import copy_to_region, reduce_from_region
from shardformer.distributed.random import in_parallel_region
from shardformer.layers.parallel_module import ParallelModule
from shardformer.shard_spec import Part, ShardSpec, shard_parameter

_log = logging.getLogger(__name__)

# Packages whose kernels replace torch's on GPUs. PyPI has another package named apex; NVIDIA's, if built with its CUDA
# extensions, comes with the second one.
LAYER_NORM_PACKAGES, RMS_NORM_PACKAGES = ("apex", "fused_layer_norm_cuda"), ("liger_kernel",)
_LIGER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # its sums are in fp32, too coarse for fp64
_LIGER_FEATURES = 65536  # one program of Triton holds a row


def are_installed(packages: tuple[str, ...]) -> bool:
    """Return whether all of the packages are installed."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


@cache
def _log_once(name: str, reason: str) -> None:
    _log.warning("%s runs torch's kernel: %s", name, reason)


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
        kernel = _apex_layer_norm() if self.bias is not None and _takes_kernels(x) else None
        if kernel is not None and (reason := _not_served_by_apex(x, self.weight)):
            _log_once(type(self).__name__, reason)
            kernel = None
        if kernel is None:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return kernel(x, self.weight, self.bias, self.normalized_shape, self.eps)


def _takes_kernels(x: Tensor) -> bool:
    """Return whether a package's kernel can run: torch.compile fuses norms itself.

    It also cannot see which arguments a Triton kernel of Liger writes to, copies all of them, and then reads beyond the
    end of some (an illegal memory access on an H100, torch 2.11).
    """
    return x.is_cuda and not torch.compiler.is_compiling()


def _not_served_by_apex(x: Tensor, weight: Tensor) -> str:
    if torch.is_autocast_enabled("cuda"):
        return "under autocast apex's rounds to 16 bit where torch's computes in fp32"
    return "" if x.dtype == weight.dtype else f"apex's takes weights of its input's {x.dtype}, not {weight.dtype}"


@cache
def _apex_layer_norm() -> Callable[..., Tensor] | None:
    if not are_installed(LAYER_NORM_PACKAGES):
        return None
    try:
        import fused_layer_norm_cuda  # noqa: F401  # apex imports it in the first forward pass only
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine
    except (ImportError, OSError) as error:
        _log_once("FusedLayerNorm", f"apex cannot be imported ({error})")
        return None
    return fused_layer_norm_affine


class FusedRMSNorm(ParallelModule):
    """RMS norm over the last dim (arXiv 1910.07467) in one kernel instead of six.

    Liger's kernel on a GPU if it is installed, else torch's.

    Args:
        offset: what is added to the weight: 1.0 for norms of Gemma, whose weights start at 0.
    """

    needs_axis = False
    can_stay_whole = True

    def __init__(self, native: nn.Module, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = native.weight, offset
        self.variance_epsilon = native.variance_epsilon if hasattr(native, "variance_epsilon") else native.eps

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup) -> FusedRMSNorm:
        """Take over the weight of a Llama-style RMS norm, which stays whole on every rank."""
        return FusedRMSNorm(module)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim of `x`, [batch, seq, hidden]."""
        kernel = _liger_rms_norm() if _takes_kernels(x) else None
        if kernel is not None and (reason := _not_served_by_liger(x, self.weight)):
            _log_once(type(self).__name__, reason)
            kernel = None
        if kernel is None:
            weight = self.weight + self.offset if self.offset else self.weight
            return F.rms_norm(x, (x.shape[-1],), weight, self.variance_epsilon)
        return kernel(x, self.weight, self.variance_epsilon, self.offset)


def _not_served_by_liger(x: Tensor, weight: Tensor) -> str:
    if x.dtype not in _LIGER_DTYPES or x.dtype != weight.dtype:
        return f"Liger's takes fp32, fp16 or bf16 for both, not inputs in {x.dtype} and weights in {weight.dtype}"
    if x.shape[-1] > _LIGER_FEATURES:
        return f"Liger's takes up to {_LIGER_FEATURES} features, not {x.shape[-1]}"
    needed = (8, 0) if x.dtype == torch.bfloat16 else (7, 0)  # of Triton
    found = torch.cuda.get_device_capability(x.device)
    if found < needed:
        return f"Liger's needs compute capability {needed[0]}.{needed[1]} for {x.dtype}, not {found[0]}.{found[1]}"
    return ""


@cache
def _liger_rms_norm() -> Callable[[Tensor, Tensor, float, float], Tensor] | None:
    if not are_installed(RMS_NORM_PACKAGES):
        return None
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except (ImportError, OSError) as error:
        _log_once("FusedRMSNorm", f"liger-kernel cannot be imported ({error})")
        return None
    if "in_place" not in inspect.signature(LigerRMSNormFunction.forward).parameters:
        _log_once("FusedRMSNorm", "this liger-kernel has no in_place option; install a newer one")
        return None

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        # In place it would overwrite the gradient of its output, which a residual after the norm reads too.
        casting_mode, in_place = "gemma" if offset else "llama", False
        return LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode, in_place)

    return rms_norm


class ParallelDropout(ParallelModule):
    """Dropout on sharded activations (heads, or a slice of the sequence): each rank draws its own mask."""

    def __init__(self, p: float, rank: int, inplace: bool = False) -> None:
        super().__init__()
        self.p, self.rank, self.inplace = p, rank, inplace

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup) -> ParallelDropout:
        """Create the layer from `nn.Dropout`."""
        return ParallelDropout(module.p, rank_of_draws(process_group), module.inplace)

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of `x`, [batch, seq, hidden]."""
        if not self.training or self.p == 0.0:
            return x
        return in_parallel_region(self.rank, F.dropout, x, self.p, True, self.inplace)

    def extra_repr(self) -> str:
        """Describe the layer for `repr`."""
        return f"p={self.p}, rank={self.rank}"


class GatedRMSNorm(ParallelModule):
    """RMS norm over the features of all ranks, with a gate.

    Input and gate: [..., local features]; ranks exchange one sum of squares per token, [..., 1].

    Args:
        native: a gated norm of one group, with a weight [features].
    """

    shards_layer = True

    def __init__(self, native: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        (size,) = native.weight.shape
        spec = ShardSpec((size,), 0, (Part(size),), dist.get_rank(group), dist.get_world_size(group))
        self.weight, self.group, self.full_features = shard_parameter(native.weight, spec), group, size
        self.variance_epsilon = native.variance_epsilon
        # That of Falcon-H1 knows both orders, and rounds last.
        self.gates_last = getattr(native, "norm_before_gate", False)
        self.rounds_last = hasattr(native, "norm_before_gate")

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup, **_: Any) -> GatedRMSNorm:
        """Shard the weight of a gated norm of transformers."""
        return GatedRMSNorm(module, process_group)

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize [..., local features] in fp32, and multiply it by `gate`; returns the dtype of the input."""
        x, dtype = hidden_states.to(torch.float32), hidden_states.dtype
        factor = 1.0 if gate is None else F.silu(gate.to(torch.float32))
        if not self.gates_last:
            x = x * factor
        squares = reduce_from_region(x.pow(2).sum(-1, keepdim=True), self.group)
        # Each rank normalizes its own features with the sum over all, so that its gradient of the sum is partial.
        variance = copy_to_region(squares, self.group) / self.full_features
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        x = self.weight * (x if self.rounds_last else x.to(dtype))
        if self.gates_last:
            x = x * factor
        return x.to(dtype) if self.rounds_last else x
