"""Load-balancing loss of routers, which a mixture of experts adds on request.

It is a product of means over all tokens of a batch (Switch Transformer, arXiv 2101.03961, section 2.2). The losses of
parts of a batch therefore do not add up: one place needs the scores of all tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shardformer.loss.forward_source import uses

_ASKED = "output_router_logits"
_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class RouterLoss:
    """Auxiliary router loss of one model.

    Args:
        model: model whose forward returns `aux_loss` and `router_logits`.
        factor: weight of the auxiliary loss in the total loss.
    """

    def __init__(self, model: nn.Module, factor: float) -> None:
        self.model, self.factor = model, factor

    def of_all(self, outputs: Any, batch: Mapping[str, Any], gather: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Compute the auxiliary loss (0-d), before its factor, over the samples of this pass and of other ranks.

        Args:
            gather: [rows, ...] of this rank -> rows of all ranks; None if there are no other ranks.

        Raises:
            ValueError: the family computes the loss in its own way, and there are other ranks.
        """
        if gather is None:
            return outputs.aux_loss
        family, mask = sys.modules[inspect.unwrap(type(self.model).forward).__module__], batch.get("attention_mask")
        function = getattr(family, "load_balancing_loss_func", None)
        if function is None or list(inspect.signature(function).parameters) != _ARGUMENTS:
            raise ValueError(
                f"output_router_logits=True: {type(self.model).__name__} computes its auxiliary loss in a way of its "
                "own, of which those of replicas cannot be put together; use dp_size=1 or output_router_logits=False"
            )
        scores = tuple(map(gather, outputs.router_logits))
        mask = None if mask is None else gather(mask.reshape(-1))[None]
        count, chosen = (self._size(name) for name in ("num_experts", "num_experts_per_tok"))
        return function(scores, count, chosen, mask)

    def _size(self, name: str) -> int:
        own = getattr(self.model, name, None)
        return getattr(self.model.config.get_text_config(), name) if own is None else own


def router_loss_of(model: nn.Module) -> RouterLoss | None:
    """Return the auxiliary loss that the model's forward may add; None if it adds none."""
    if not uses(type(model).forward, "aux_loss"):
        return None
    holders = [model, *([model.config.get_text_config()] if hasattr(model, "config") else [])]
    factors = (getattr(holder, name, None) for holder in holders for name in _FACTORS)
    factor = next((factor for factor in factors if factor is not None), None)
    return None if factor is None else RouterLoss(model, factor)


def routers_are_asked(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether the loss of a pass over `batch` includes a part that reads the scores of all routers."""
    if not uses(type(model).forward, _ASKED) and not uses(type(model).forward, "aux_loss"):
        return False
    asked = batch.get(_ASKED)
    if asked is None and hasattr(model, "config"):
        asked = getattr(model.config, _ASKED, None) or getattr(model.config.get_text_config(), _ASKED, None)
    return bool(asked)
