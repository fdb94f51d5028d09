"""xformers' memory-efficient attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.attention.backend import AMPERE, HALF, AttentionBackend, AttentionNeeds

_BYTES_OF_LOAD = 16  # what one vector load of the CUTLASS kernels reads
_ALIGNED_KEYS = 8  # xformers reads a bias in vectors of up to 8 numbers: its rows must start at multiples of them


def xformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run xformers' memory-efficient attention; query, key, value: [batch, heads, seq, head_dim].

    Masks are those that transformers makes for SDPA. The output is [batch, seq, heads, head_dim].
    """
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    masks = [mask for mask in (attention_mask, kwargs.get("position_bias")) if mask is not None]
    bias: Any = LowerTriangularMask() if attention_mask is None and causal and query.shape[2] > 1 else None
    if masks and bias is not None:  # xformers takes a bias or a pattern, not both
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        masks.append(seen[None, None])
    if masks:
        bias = _aligned(sum(_additive(mask, query.dtype) for mask in masks), query, key)
    heads_last = [x.transpose(1, 2) for x in (query, key, value)]
    return memory_efficient_attention(*heads_last, attn_bias=bias, p=dropout, scale=scaling), None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask or bias to an additive one in `dtype`."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask.to(dtype)


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return `bias` as [batch, heads, queries, keys], in rows of which each starts at a multiple of 8 numbers."""
    keys = key.shape[2]
    rows = F.pad(bias, (0, -keys % _ALIGNED_KEYS)).contiguous()[..., :keys]
    return rows.expand(*query.shape[:3], keys)


def _limits(needs: AttentionNeeds) -> str:
    if needs.device != "cuda" or needs.dtype not in (*HALF, torch.float32):
        return f"runs on GPUs in fp32, fp16 or bf16, not on {needs.device} in {needs.dtype}"
    if needs.dtype == torch.bfloat16 and needs.capability is not None and needs.capability < AMPERE:
        return f"needs a GPU of compute capability 8.0 (Ampere) or more for bf16, not {needs.gpu}"
    step = _BYTES_OF_LOAD // needs.dtype.itemsize
    for size in needs.head_dims:
        if size % step:
            return f"takes head sizes that {step} divides in {needs.dtype}, not {size}"
    return ""


def _not_usable() -> str:
    """Ask xformers, whose Python part can be imported without its kernels."""
    from xformers.ops.fmha import cutlass

    lacks = "has no kernels that load here (built for another torch or Python, or for CPUs)"
    return "" if cutlass.FwOp.is_available() else f"{lacks}; install a build for torch {torch.__version__}"


XFORMERS = AttentionBackend(
    name="xformers",
    package="xformers",
    limits=_limits,
    not_usable=_not_usable,
    kernel=xformers_attention,
    masks="sdpa",
    is_like_sdpa=True,
)
