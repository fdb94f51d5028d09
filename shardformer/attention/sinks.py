"""Attention sinks: a learned score of each head that has no value, so that it only takes weight from the keys.

As in GPT-OSS; after Xiao et al., arXiv 2309.17453. Models pass them to the kernel as `s_aux`, [heads], and eager
kernels read them as `module.sinks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.attention.named_kernels import View

PARAMETER = "sinks"
_ARGUMENT = "s_aux"


def with_own_sinks(kernel: Callable[..., Any], arguments: Mapping[str, Any], rank: int) -> Callable[..., Any]:
    """Return a kernel that takes the sinks of this rank's heads, where heads were exchanged for parts of sequences.

    Args:
        kernel: (module, query, ...), query: [batch, heads of this rank, seq, head_dim].
        arguments: with which it will be called; without sinks it is returned as it is.
        rank: in the group that exchanges.
    """
    return kernel if arguments.get(_ARGUMENT) is None else partial(_call, kernel, rank)


def _call(
    kernel: Callable[..., Any], rank: int, module: nn.Module, query: Tensor, *args: Any, s_aux: Tensor, **kwargs: Any
) -> Any:
    heads = query.shape[1]
    own = s_aux.narrow(0, rank * heads, heads)
    return kernel(View(module, sinks=own), query, *args, s_aux=own, **kwargs)
