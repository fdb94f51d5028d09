"""Detection of user changes to a model's loss: replaced functions, forwards and hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from shardformer.loss.forward_source import calls_loss_function
from shardformer.loss.routers import routers_are_asked
from shardformer.loss.terms import Batch, HeadLoss

_OURS = ("shardformer.", "plugins.hybrid_parallel.", "transformers.", "torch.")


def own_loss_reason(model: nn.Module, head_loss: HeadLoss | None, batch: Batch) -> str | None:
    """Return why the model's own forward has to compute the loss, because it differs from the head's loss.

    None if `head_loss` gives the same loss for this batch.
    """
    name = type(model).__name__
    if head_loss is None:
        return f"the forward of {name} computes a loss of its own"
    if "forward" in vars(model):
        return f"the forward of this {name} was replaced"
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    if any(map(_is_users, hooks)):
        return f"a forward hook on the {name} may change it"
    if calls_loss_function(type(model).forward):
        function = model.loss_function
        home, known = str(getattr(function, "__module__", "")), head_loss.function
        called = getattr(function, "__name__", type(function).__name__)
        if not home.startswith("transformers.loss.") or known not in (None, called):
            return f"its loss_function is {called}"
    if head_loss.routers is None and routers_are_asked(model, batch):
        return "it adds an auxiliary loss of its routers"
    unread = head_loss.unread(batch)
    return None if unread is None else f"its loss reads {unread}"


def _is_users(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    home = getattr(function, "__module__", None) or type(function).__module__
    return not home.startswith(_OURS)
