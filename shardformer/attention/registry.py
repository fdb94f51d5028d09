"""Our entries in transformers' attention and mask registries.

Every attention of a sharded model that goes through the registry is called by one function: the sequence exchange of
`all_to_all` around it, a random stream of this rank's own for its dropout, then the kernel. The mask function of the
same name is registered with it, because transformers silently drops the padding mask of a name that has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.attention.backends import (
    SDPA,
    choose_backend,
    keeps_scores,
    log_once,
    sdpa_without_slow_kernels,
    xformers_attention,
)
from shardformer.distributed.random import parallel_region
from shardformer.sequence_parallel.ulysses import UlyssesAllToAll

_PREFIX = "sharded_"


def use_sharded_attention(model: nn.Module, tp_rank: int, exchange: UlyssesAllToAll | None = None) -> None:
    """Route every attention of `model` that goes through the registry to a kernel with per-rank dropout.

    The kernel stays the one the model was built with (SDPA by default). Models without the registry are left as
    they are: their policies say how their attention dropout is made parallel.
    """
    for module in routed_modules(model, _PREFIX, _register):
        module.sharded_attention_rank, module.sequence_exchange = tp_rank, exchange


def recompute_attention(model: nn.Module) -> None:
    """Selective recomputation (arXiv 2205.05198, section 5): what grows with the square of the sequence is not kept.

    Attention kernels that would keep their scores for the backward pass run again there; fused ones keep none.
    """
    for module in routed_modules(model, _PREFIX, _register):
        module.recomputes_attention = True


def routed_modules(model: nn.Module, prefix: str, register: Callable[[str, str], None]) -> Iterator[nn.Module]:
    """The modules that choose a kernel by name, once the name is one of ours.

    Args:
        prefix: what makes a name ours.
        register: (our name, the name that the model had) -> enters ours in the registries.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation is None or not uses_registry(module):
            continue
        if not implementation.startswith(prefix):
            register(prefix + implementation, implementation)
            config._attn_implementation = prefix + implementation
        yield module


def uses_registry(module: nn.Module) -> bool:
    """Families that choose a kernel themselves compare the name in the configuration: it has to stay what it is."""
    return hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")


def use_backend(model: nn.Module, request: bool | str, device: str, dtype: torch.dtype) -> None:
    """Let every attention of `model` that goes through transformers' registry use the backend; log what stays slow.

    Raises:
        ValueError: see `choose_backend`.
    """
    found = False
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is None or not uses_registry(module):
            continue
        found = True
        owner = module if hasattr(module, "_supports_sdpa") else model
        backend = choose_backend(
            request,
            supports_flash=getattr(owner, "_supports_flash_attn", False),
            supports_sdpa=getattr(owner, "_supports_sdpa", False),
            soft_caps=getattr(config, "attn_logit_softcapping", None) is not None,
            device=device,
            dtype=dtype,
        )
        if backend.implementation is not None:
            config._attn_implementation = backend.implementation
        elif backend.reason:
            log_once(type(model).__name__, f"keeps its own attention: {backend.reason}")
    if not found:
        log_once(type(model).__name__, "keeps its own attention: it is written out in the model's modules")


def _register(name: str, implementation: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _sharded(implementation))
    AttentionMaskInterface.register(name, masks_of(implementation))


def masks_of(implementation: str) -> Callable[..., Any]:
    """What makes the masks that a kernel takes."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa" if implementation in (SDPA, "xformers") else implementation]


def _sharded(implementation: str) -> Any:
    def sharded_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """query, key, value: [batch, local heads, seq, head_dim]; output: [batch, seq, local heads, head_dim]."""
        exchange = getattr(module, "sequence_exchange", None)
        if exchange is None:
            return call_kernel(implementation, module, query, key, value, attention_mask, **kwargs)
        query, key, value = exchange.to_heads(query, key, value)
        if hasattr(module, "num_key_value_groups"):  # key/value heads may have been repeated
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        found, weights = call_kernel(implementation, module, query, key, value, attention_mask, **kwargs)
        return exchange.to_sequence(found), weights

    return sharded_attention


def call_kernel(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel of that name; its dropout draws from this rank's stream where ranks have heads of their own."""
    kernel = kernel_named(implementation, module)
    recomputes = getattr(module, "recomputes_attention", False) and torch.is_grad_enabled()
    if recomputes and keeps_scores(implementation, query, attention_mask, **kwargs):
        kernel = partial(checkpoint, kernel, use_reentrant=False, preserve_rng_state=bool(kwargs.get("dropout")))
    # Where all ranks run all heads they have to drop alike; a single rank goes on with its own stream.
    is_alike = getattr(module, "attention_is_replicated", False) or not hasattr(module, "sharded_attention_rank")
    if not kwargs.get("dropout") or is_alike:
        return kernel(module, query, key, value, attention_mask, **kwargs)
    with parallel_region(module.sharded_attention_rank):
        return kernel(module, query, key, value, attention_mask, **kwargs)


def kernel_named(implementation: str, module: nn.Module) -> Any:
    """The kernel behind the name; `eager` is not in the registry but beside the module's class."""
    if implementation == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    if implementation == SDPA:
        return sdpa_without_slow_kernels
    if implementation == "xformers":
        return xformers_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[implementation]
