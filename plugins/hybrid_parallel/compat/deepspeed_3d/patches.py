"""`custom_patcher`: forwards that the user puts around those of single modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from shardformer.stages.stage import StagePlaceholder, has_module
from shardformer.utils.module_paths import ends_in, nearest_names

# (the module's forward, the module) -> its new forward
Patch = Callable[[Callable[..., Any], nn.Module], Callable[..., Any]]


def find_patched(model: nn.Module, patcher: Mapping[str, Patch]) -> dict[nn.Module, list[Patch]]:
    """The modules that `patcher` names, each with its patches, the first innermost.

    Args:
        patcher: the path of a module, or the end of one, in which `*` stands for any number -> its patch. A whole path
            means that module alone.

    Raises:
        ConfigurationError: names that match no module, with the nearest that would.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    found: dict[nn.Module, list[Patch]] = {}
    problems = []
    for name, patch in patcher.items():
        paths = [name] if name in modules else [path for path in modules if ends_in(path, name)]
        if not paths:
            problems.append(
                f"custom_patcher names '{name}', which matches no module of {type(model).__name__}; use one of "
                f"{nearest_names(name, modules)}, or * for the number of a layer"
            )
        for path in paths:
            found.setdefault(modules[path], []).append(patch)
    if problems:
        raise ConfigurationError("; ".join(problems))
    return found


class ForwardPatches:
    """Patches of a model that is about to be sharded.

    A module that gets a sharded twin, or another forward, in the course of that is patched once more afterwards: then
    the patch is given the twin, and its forward.

    Args:
        model: the whole model.
        patched: its modules -> their patches.
    """

    def __init__(self, model: nn.Module, patched: Mapping[nn.Module, list[Patch]]) -> None:
        # Paths and not modules, which are to be let go.
        self._patches = {path: patched[module] for path, module in model.named_modules() if module in patched}

    def apply(self, model: nn.Module) -> None:
        """Patch every module that is here and is not patched yet.

        Raises:
            ConfigurationError: a patch returned no function.
        """
        for path, patches in self._patches.items():
            if not has_module(model, path) or isinstance(module := model.get_submodule(path), StagePlaceholder):
                continue  # it runs on another stage
            present = vars(module).get("forward")
            if getattr(present, "patched_module", None) is module:
                continue
            if hasattr(present, "patched_module"):  # the twin is a copy of the module that was patched
                del module.forward
            module.forward = _patched(path, module, patches)

    def remove(self, model: nn.Module) -> None:
        """Undo it, where the model turned out not to be one that can be sharded as asked."""
        for path in self._patches:
            module = model.get_submodule(path) if has_module(model, path) else None
            present = vars(module).get("forward") if module is not None else None
            if hasattr(present, "native_in_dict"):
                del module.forward
                if present.native_in_dict is not None:
                    module.forward = present.native_in_dict


def _patched(path: str, module: nn.Module, patches: list[Patch]) -> Callable[..., Any]:
    native = module.forward
    new = native
    for patch in patches:
        new = patch(new, module)
        if not callable(new):
            raise ConfigurationError(
                f"custom_patcher: the patch of {path} returned a {type(new).__name__}; return the new forward"
            )

    @functools.wraps(native)  # stages find the inputs of a layer by the names of its parameters
    def forward(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs)

    forward.__module__ = __name__  # not a user's own forward: it is put around that of the sharded twin again
    forward.patched_module, forward.native_in_dict = module, vars(module).get("forward")
    return forward
