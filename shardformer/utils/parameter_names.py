"""Names of parameters; a tied parameter has several."""

from __future__ import annotations

from torch import nn


def names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return id of each parameter -> its names, several if it is tied, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def alias_groups(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, in the model's order."""
    return list(names_of_parameters(model).values())


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return groups of names that refer to one parameter, in the model's order."""
    return [names for names in alias_groups(model) if len(names) > 1]


def retie(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie the names of each group again after replacements; a sharded parameter takes precedence."""
    for names in tied:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        held = [name for name in names if name in parameters]
        if not held:
            continue
        sharded = [name for name in held if getattr(parameters[name], "shard_spec", None) is not None]
        keep = parameters[(sharded or held)[0]]
        for name in held:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, keep)
