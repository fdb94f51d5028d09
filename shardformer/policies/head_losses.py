"""Lookup of the loss of a model's head in what its policy, or its family's policy or plan, declares."""

from __future__ import annotations

import inspect

from torch import nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES, HeadLossBuilder, HeadLosses, matching_key
from shardformer.loss.terms import HeadLoss
from shardformer.policies.base import Policy
from shardformer.policies.plans.plan import declared_head_losses_of
from shardformer.policies.registry import family_policy_of, registered_policy_of
from shardformer.utils.source import adds_to_loss, calls_loss_function, passes_keywords


def head_loss_of(model: nn.Module) -> HeadLoss | None:
    """Return the loss of the model's head; None if the model's own loss must be used.

    It is None for a head (or a bare model) without a loss, and for a head whose loss may differ from what its name
    implies: its forward is the user's own, or it does not call transformers' `loss_function` and no `head_losses` has
    the head.
    """
    build = head_loss_builder(type(model), getattr(model, "declared_head_losses", {}))
    loss = None if build is None else build(model)
    if loss is not None:
        loss.reads_keywords = passes_keywords(type(model).forward)
    return loss


def head_loss_builder(cls: type[nn.Module], declared: HeadLosses | None = None) -> HeadLossBuilder | None:
    """Return the builder of the loss of the head class whose forward `cls` uses; None if the loss is not known.

    Args:
        declared: losses that the user's policy declares; they precede those of the family.
    """
    definer = next(each for each in cls.__mro__ if "forward" in vars(each))
    forward = definer.forward
    if inspect.unwrap(forward).__module__ != definer.__module__:
        return None  # the forward has been replaced
    users = cls.__mro__[: cls.__mro__.index(definer) + 1]
    candidates = [(each.__name__, declared or {}) for each in users]
    candidates += [(each.__name__, _declared_by(registered_policy_of(each))) for each in users]
    head = _library_head(cls, definer)
    if head is not None:
        family = (_declared_by(family_policy_of(head)), declared_head_losses_of(head))
        usual = USUAL_HEAD_LOSSES if calls_loss_function(forward) else {}
        candidates += [(head.__name__, losses) for losses in (*family, usual)]
    for name, losses in candidates:
        key = matching_key(name, losses)
        if key is not None:
            # A suffix does not tell what a forward adds to the result of `loss_function`; a full name does.
            is_more = key != name and calls_loss_function(forward) and adds_to_loss(forward)
            return None if is_more else losses[key]
    return None


def keep_head_losses(model: nn.Module, policy: Policy) -> None:
    """Store the losses that the user's policy declares on the model, where `head_loss_of` looks for them."""
    declared = _declared_by(policy)
    if declared:
        model.declared_head_losses = declared


def _library_head(cls: type[nn.Module], definer: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class of transformers, of this package or of its remote code that `definer`'s forward is for."""
    library = definer.__module__.partition(".")[0]
    if library == "transformers":
        return next(each for each in cls.__mro__ if each.__module__.startswith("transformers."))
    return definer if library in ("shardformer", "transformers_modules") else None


def _declared_by(policy: Policy | type[Policy] | None) -> HeadLosses:
    """Return the `head_losses` that the policy or its class sets; those of a base class are about other heads."""
    if policy is None:
        return {}
    holders = (policy,) if isinstance(policy, type) else (policy, type(policy))
    return next((vars(each)["head_losses"] for each in holders if "head_losses" in vars(each)), {})
