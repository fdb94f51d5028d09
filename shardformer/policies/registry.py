"""Lookup of the policy of a model by its class, without importing transformers' families or other families here.

What comes first: a registered policy, this package's table of the family, its plan, that of transformers, one that was
derived from the family's models. `resolve` has what a user gives, too.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from torch import nn

from shardformer.loss.heads import OWN_HEAD_LOSSES, USUAL_HEAD_LOSSES, HeadLossBuilder, HeadLosses, matching_key
from shardformer.loss.terms import HeadLoss
from shardformer.policies.backbone import BackbonePolicy, backbones_of
from shardformer.policies.base import Policy
from shardformer.policies.plans.plan import (
    completion_of,
    declared_head_losses_of,
    declared_plan,
    family_of,
    proposed_plan,
)
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.policies.plans.stages import is_below
from shardformer.utils.module_paths import starred
from shardformer.utils.source import adds_to_loss, calls_loss_function, passes_keywords

# Model class -> policy class, both "package.module.Class". One per process, as `register_policy` takes no object: a
# model's package registers its policy when it is imported, before there is a plugin.
_REGISTERED: dict[str, str] = {}
_FOLDER = re.compile(r"(?:transformers|shardformer)\.models\.(\w+)")


@cache
def _texts() -> dict[str, str]:
    files = sorted((Path(__file__).parent / "families").glob("[a-z]*.py"))
    return {path.stem: path.read_text(encoding="utf-8") for path in files}


@cache
def family_files(pattern: str = ".+") -> tuple[str, ...]:
    """Return the files in `families` with a quoted name that matches: others need not be imported."""
    return tuple(file for file, text in _texts().items() if re.search(rf'"({pattern})"', text))


@cache
def _policies_in(file: str) -> dict[str, type[Policy]]:
    """Return the policies of a file in `families`, by family: its classes that set `family`."""
    module = importlib.import_module(f"shardformer.policies.families.{file}")
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Policy)]
    return {cls.family: cls for cls in classes if cls.__dict__.get("family") is not None}


def family_policies() -> dict[str, type[Policy]]:
    """Return the policy of each family that has one; it imports all of their files."""
    return {family: policy for file in family_files() for family, policy in _policies_in(file).items()}


def _classes_of(policies: Mapping[str, type[Policy]]) -> dict[str, type[Policy]]:
    """Return the policy of each model class that policies name, by the qualified name of the class."""
    return {
        f"{policy.module or f'transformers.models.{family}.modeling_{family}'}.{policy.prefix}{head}": policy
        for family, policy in policies.items()
        for head in policy.heads
    }


def supported_classes() -> dict[str, type[Policy]]:
    """Return the policy of each supported model class, by the qualified name of the class."""
    return _classes_of(family_policies())


def register_policy(qualified_name: str, policy: str) -> None:
    """Register a custom policy for a model class.

    Args:
        qualified_name: the model class, "package.module.Class".
        policy: the policy class, "package.module.Class"; imported when it is first needed.
    """
    _REGISTERED[qualified_name] = policy


def registered_policy_of(cls: type[nn.Module]) -> type[Policy] | None:
    """Return the custom policy registered for a model class; None if there is none."""
    by_bare_name = {name.rpartition(".")[2]: location for name, location in _REGISTERED.items()}
    location = _REGISTERED.get(f"{cls.__module__}.{cls.__qualname__}") or by_bare_name.get(cls.__name__)
    if location is None:
        return None
    module, _, name = location.rpartition(".")
    return getattr(importlib.import_module(module), name)


def family_policy_of(cls: type[nn.Module]) -> type[Policy] | None:
    """Return this package's policy of a library's class, or None; remote code is matched by unqualified name."""
    if cls.__module__.startswith("transformers_modules."):
        return _named_like(cls.__name__, "shardformer.")
    folder = _FOLDER.match(cls.__module__)
    for file in family_files(rf"{folder[1]}\w*") if folder else ():
        if (policy := _classes_of(_policies_in(file)).get(f"{cls.__module__}.{cls.__name__}")) is not None:
            return policy
    return None


def _named_like(name: str, library: str = "") -> type[Policy] | None:
    """Return the policy of the classes of a library that have this name, of whatever module."""
    prefixes = "|".join(name[:length] for length in range(2, len(name) + 1))
    for file in family_files(prefixes):
        for known, policy in _classes_of(_policies_in(file)).items():
            if known.startswith(library) and known.rpartition(".")[2] == name:
                return policy
    return None


def _is_around_backbones(model: nn.Module) -> bool:
    """Return whether a module has models of transformers with policies inside, and no plan for what is around them."""
    found = [starred(path) for path in backbones_of(model, policy_for)]
    planned = (getattr(model, "tp_plan", None) or {}).keys() & {starred(path) for path, _ in model.named_modules()}
    return bool(found) and all(is_below(path, found) for path in planned)


def policy_for(model: nn.Module) -> Policy:
    """Return the policy of the model's class, or of its nearest base class that has one.

    A class of another module (remote code) is matched by its unqualified name. A module of the user's around models of
    transformers has the policies of these.

    Raises:
        ValueError: no policy is known.
    """
    for cls in type(model).__mro__:
        registered = registered_policy_of(cls)
        if registered is not None:
            return registered()
        is_of_family = cls.__module__.startswith("transformers.")
        policy = family_policy_of(cls) or (None if is_of_family else _named_like(cls.__name__))
        if policy is not None:
            return policy()
        declared = declared_plan(family_of(cls))
        # A module of the user's may be derived from the base class of a family, which has no forward.
        if declared is not None and getattr(cls, "forward", nn.Module.forward) is not nn.Module.forward:
            return PlanPolicy(declared)
    if not type(model).__module__.startswith("transformers.") and _is_around_backbones(model):
        return BackbonePolicy(policy_for)
    families = map(family_of, type(model).__mro__)
    derived = next((plan for family in families if (plan := proposed_plan(family)) is not None), None)
    has_plan = bool(getattr(model, "tp_plan", None))
    if has_plan or derived is not None or completion_of(type(model)) is not None:
        return PlanPolicy(None if has_plan else derived)
    name = type(model).__name__
    near = difflib.get_close_matches(name, {known.rpartition(".")[2] for known in supported_classes()}, n=3)
    raise ValueError(
        f"model class {name} has neither a sharding policy nor a plan of its own; tp_size=1 with pp_size=1 trains it "
        "data-parallel as it is, sharding_dim=-1 cuts its linear layers over tp_size, and a Policy (custom_policy=…), "
        "a TPInfo or slots describe how to shard it (docs/writing_a_policy.md); booster verify --propose derives a plan"
        + (f"; classes with a policy: {', '.join(near)}" if near else "")
    )


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
    """Return the loss builder of `cls`'s head, or None; `declared`: by the user's policy, which precede."""
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
        usual = USUAL_HEAD_LOSSES if calls_loss_function(forward) else OWN_HEAD_LOSSES
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
