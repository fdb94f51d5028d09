"""torch's own flash kernel for sequences of any lengths in one row: `torch.nn.attention.varlen`.

It runs where a pass says which documents its rows hold, and then sees no pair of tokens of two documents. Everything
else (padding, caches, rows of one document) runs through SDPA with the masks of SDPA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.attention.backend import (
    HALF,
    AttentionBackend,
    AttentionNeeds,
    flash_limits,
    sdpa_without_slow_kernels,
)
from shardformer.matmul.weight_grad import autocast

VARLEN = "flash_varlen"  # models ask by the name whether a kernel is told of documents, as flash-attn is


class MaskIfRead:
    """A mask for SDPA, [batch, 1, seq, seq], that is made by the first layer that reads it.

    Args:
        make: returns the mask.
    """

    def __init__(self, make: Callable[[], Tensor | None]) -> None:
        self._make = make

    @cached_property
    def mask(self) -> Tensor | None:
        """The mask; None if SDPA needs none."""
        return self._make()


def varlen_masks(*args: Any, **given: Any) -> Any:
    """Return the masks of SDPA, those that hide more than later tokens without making them."""
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        bidirectional_mask_function,
        causal_mask_function,
    )

    make = partial(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], *args, **given)
    is_plain = given.get("mask_function") in (None, causal_mask_function, bidirectional_mask_function)
    is_whole = given.get("attention_mask") is None and given.get("q_length") == given.get("kv_length")
    return make() if args or is_plain or not is_whole else MaskIfRead(make)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskIfRead | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within the documents of rows; query, key, value: [batch, heads, seq, head_dim].

    Args:
        cu_seq_lens_q, cu_seq_lens_k: where documents start in all rows, one behind the other; None for no documents.
        max_length_q, max_length_k: tokens of the longest.

    Returns:
        [batch, seq, heads, head_dim], None.

    Raises:
        TypeError: there are documents, and the kernel cannot run.
    """
    if cu_seq_lens_q is None:
        mask = attention_mask.mask if isinstance(attention_mask, MaskIfRead) else attention_mask
        return sdpa_without_slow_kernels(
            module, query, key, value, mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
    query, key, value = autocast(query, key, value)
    dtype, size = value.dtype, value.shape[-1]
    if dtype not in HALF or kwargs.get("dropout"):
        raise TypeError(
            f"{type(module).__name__} has packed documents in {dtype}, with dropout {kwargs.get('dropout', 0.0)}, and "
            f"{VARLEN} takes them in 16 bit, without dropout; use enable_flash_attention='sdpa'"
        )
    if size != query.shape[-1]:  # latent attention (MLA) has smaller values
        value = F.pad(value, (0, query.shape[-1] - size))
    if not _takes_groups():
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    tokens = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value))  # [all tokens, heads, head_dim]
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    before = -1 if sliding_window is None else sliding_window - 1
    window = (before, 0 if causal else before)
    borders = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    options = {"scale": scaling, "window_size": window, **({"enable_gqa": True} if _takes_groups() else {})}
    found = torch.nn.attention.varlen.varlen_attn(*tokens, *borders, **options)
    return found.unflatten(0, (len(query), -1)).narrow(-1, 0, size), None


@cache
def _takes_groups() -> bool:
    """Return whether this torch's kernel takes fewer key/value heads than heads; 2.11 asks for equal numbers."""
    import torch.nn.attention.varlen

    return "enable_gqa" in inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters


def _limits(needs: AttentionNeeds) -> str:
    if needs.soft_caps:
        return "cannot cap attention scores, which the model needs"
    if not needs.takes_arguments:
        return "is told of documents by arguments, which the model does not hand on"
    return flash_limits(VARLEN, needs)


def _not_usable() -> str:
    is_lacking = torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available()
    return "needs a build of torch with flash kernels" if is_lacking else ""


FLASH_VARLEN = AttentionBackend(
    name=VARLEN,
    package="torch.nn.attention.varlen",
    limits=_limits,
    not_usable=_not_usable,
    kernel=varlen_attention,
    masks=varlen_masks,
    is_automatic=True,
    is_like_sdpa=True,
)
