"""Checks of the arguments of calls after `boost`: the model and the optimizer that it returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.guards import GuardedModel, GuardedOptimizer, refuse_traced_call


def check_boosted(objects: Mapping[str, Any]) -> None:
    """Refuse objects, by kind ("model", "optimizer", "dataloader", …), whose state cannot be saved or restored.

    Raises:
        ConfigurationError: if `boost` did not return the model or the optimizer, or if a loader has no state.
    """
    checks = {"model": check_boosted_model, "optimizer": check_boosted_optimizer, "dataloader": check_resumable_loader}
    for kind, check in checks.items():
        if objects.get(kind) is not None:
            check(objects[kind])


def check_boosted_model(model: Any) -> None:
    """Refuse a model that `boost` did not return.

    Raises:
        ConfigurationError: if it is the user's own model, or another module around a boosted one, or if a compiler
            traces this call.
    """
    refuse_traced_call()
    if isinstance(model, GuardedModel):
        return
    kind = type(model).__name__
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    inside = next((path for path, each in modules if isinstance(each, GuardedModel)), None)
    if inside is not None:
        raise ConfigurationError(f"the model is {kind} around the one that boost() returned; pass its .{inside}")
    raise ConfigurationError(
        f"the model is a plain {kind}; pass the model that boost() returned: "
        "model, optimizer, … = booster.boost(model, optimizer, …)"
    )


def check_boosted_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that `boost` did not return.

    Raises:
        ConfigurationError: if it is the user's own optimizer, or if a compiler traces this call.
    """
    refuse_traced_call()
    if not isinstance(optimizer, GuardedOptimizer):
        raise ConfigurationError(
            f"the optimizer is a plain {type(optimizer).__name__}; pass the one that boost() returned for one that "
            "was made before: model, optimizer, … = booster.boost(model, optimizer, …)"
        )


def check_resumable_loader(loader: Any) -> None:
    """Refuse a loader that does not know its position.

    Raises:
        ConfigurationError: if so, as for torch's own `DataLoader`.
    """
    if not callable(getattr(loader, "state_dict", None)):
        raise ConfigurationError(
            f"the loader is a plain {type(loader).__name__}, which cannot say where it is in its epoch; pass the one "
            "that boost() returned: model, optimizer, loader = booster.boost(model, optimizer, loader)"
        )
