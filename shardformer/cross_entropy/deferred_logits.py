"""DeferredLogits: placeholder that a language-model head returns instead of logits, for a loss to consume.

It has the shape and dtype of the logits. A loss that knows it uses the hidden states and the weight instead, see
`fused_linear.py`. Any other access - a cap, a scale, a bias, a slice, a hook - gets the logits, as if the head
had computed them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from shardformer.cross_entropy.chunking import chunk_bytes, decided
from shardformer.cross_entropy.fused_linear import fused_linear_cross_entropy_sum


@dataclass(frozen=True)
class LMHeadCall:
    """One call of a language-model head.

    Attributes:
        hidden: input of the head, [..., hidden].
        weight: [vocabulary, hidden], or this rank's shard of it.
        bias: [vocabulary], or this rank's shard of it, or None.
        compute: the head's own forward, `hidden` -> logits.
        vocab_range, group: local rows of the vocabulary, and the axis over which it is sharded; None for all rows.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    compute: Callable[[Tensor], Tensor]
    vocab_range: tuple[int, int] | None = None
    group: ProcessGroup | None = None


class DeferredLogits(torch.Tensor):
    """Logits [..., vocabulary] that are computed only when something reads them; see `logits_of` and `loss_of`."""

    __slots__ = (
        "call",
        "logits",
        "trains",
    )  # not in __dict__, by which debug tools recognize pending tensors

    @staticmethod
    def __new__(cls, call: LMHeadCall) -> DeferredLogits:
        """Create an empty tensor with the shape, dtype and device of the logits."""
        shape, hidden = (*call.hidden.shape[:-1], len(call.weight)), call.hidden
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=hidden.dtype, device=hidden.device, requires_grad=_needs_grad(call)
        )
        self.call, self.logits, self.trains = call, None, torch.is_grad_enabled()
        if _needs_grad(call):
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.contiguous and not kwargs and len(args) == 1:
            return args[0]
        args, kwargs = tree_map_only(cls, logits_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Only calls from C++ arrive here, such as a collective; no gradient flows through them.
        args, kwargs = tree_map_only(cls, logits_of, (args, kwargs or {}))
        return func(*args, **kwargs)


_LOOKS = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda")
    }
    | {getattr(Tensor, name) for name in ("dim", "size", "numel", "nelement", "element_size", "is_floating_point")}
    | {Tensor.__hash__, Tensor.__len__}
)


def defer_logits(call: LMHeadCall) -> Tensor:
    """Return the logits of a head call: deferred if that saves memory, else computed at once."""
    is_plain = call.hidden.dtype == call.weight.dtype and not torch.is_autocast_enabled(call.hidden.device.type)
    return DeferredLogits(call) if is_plain and saves_memory(call) else call.compute(call.hidden)


def saves_memory(call: LMHeadCall) -> bool:
    """Return whether deferring the logits of a call saves memory.

    It does if the fp32 logits are larger than one chunk of the loss, and larger than the weight gradient, which the
    loss keeps instead of them.
    """
    tokens, columns = call.hidden.shape[:-1].numel(), len(call.weight)
    kept = call.weight.numel() if torch.is_grad_enabled() and call.weight.requires_grad else 0
    return decided(call.weight.shape, 4 * tokens * columns > max(chunk_bytes(call.hidden.device), 4 * kept))


def logits_of(deferred: DeferredLogits) -> Tensor:
    """Compute the logits, with the autograd graph that the head would have given them."""
    if deferred.logits is None:
        with torch.set_grad_enabled(deferred.trains):
            deferred.logits = deferred.call.compute(deferred.call.hidden)
    return deferred.logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor | None:
    """Return the sum of the cross-entropy (0-d) of deferred logits that nothing has read; None for other logits.

    Args:
        labels: [...], -100 where ignored.
    """
    if not isinstance(logits, DeferredLogits) or logits.logits is not None:
        return None
    call = logits.call
    return fused_linear_cross_entropy_sum(call.hidden, call.weight, call.bias, labels, call.vocab_range, call.group)


def _needs_grad(call: LMHeadCall) -> bool:
    tensors = (call.hidden, call.weight, call.bias)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse_gradient(_: Tensor) -> None:
    raise RuntimeError(
        "deferred logits were given to an autograd.Function, which cannot propagate their gradient; "
        "give it logits.view_as(logits), or use return_outputs=True"
    )
