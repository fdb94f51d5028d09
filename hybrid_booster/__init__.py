"""hybrid-booster under a unique name, for scripts next to modules that shadow its packages.

Other code also uses the names `booster`, `plugins` and `shardformer`, and a module in the directory of a script comes
before an installed one. This package imports them from its own location, under their own names:

    from hybrid_booster import Booster, HybridParallelPlugin, launch_from_torch, shardformer
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PLACE = Path(__file__).resolve().parents[1]


def import_from_here(name: str) -> ModuleType:
    """Import a package or module that is installed next to this one, under its own name; it runs when it is first used.

    So the `booster` command shows help and versions without torch, whose import takes seconds.

    Raises:
        ImportError: another package of that name was imported before, or there is none next to this one.
    """
    *parents, last = name.split(".")
    own = _PLACE.joinpath(*parents)
    found = sys.modules.get(name)
    if found is not None:
        place = Path(found.__file__ or next(iter(found.__path__))).resolve()
        if own / last not in (place.parent, place.with_suffix("")):  # a package, a module
            raise ImportError(
                f"'{name}' is {place} in this process, and not hybrid-booster's; import hybrid_booster before it, or "
                "rename it",
                name=name,
            )
        return found
    spec = PathFinder.find_spec(name, [str(own)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{own / last} does not exist; install hybrid-booster again", name=name)
    module = sys.modules[name] = _LazyModule(spec)
    return module


class _LazyModule(ModuleType):
    """A module that runs when a name of its code is first looked up, or a module in it.

    importlib's LazyLoader runs it for `__file__` too, which `inspect` reads of all modules in the middle of torch's
    import.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__, self.__loader__, self.__package__ = spec, spec.origin, spec.loader, spec.parent
        self._has_run = False

    def __getattr__(self, name: str) -> Any:
        if self._has_run:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._has_run = True
        if self.__spec__.submodule_search_locations is not None:
            self.__path__ = self.__spec__.submodule_search_locations
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


class _LoadedMeanwhile(MetaPathFinder, Loader):
    """Finds a module that its lazy parent has imported while importlib asked for the parent's path: once is enough."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec of the module that is there; None for another."""
        found = sys.modules.get(name)
        is_ours = isinstance(sys.modules.get(name.rpartition(".")[0]), _LazyModule)
        return ModuleSpec(name, self, loader_state=found.__spec__) if is_ours and found and target is None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that is there."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""
        module.__spec__ = module.__spec__.loader_state


def _attach(module: ModuleType, dotted: str) -> None:
    """Set `plugins.hybrid_parallel` as an attribute of `plugins`, if `plugins` is a namespace package."""
    parent, _, name = dotted.rpartition(".")
    with suppress(ValueError):  # a module without a spec is in sys.modules
        spec = find_spec(parent)
        if spec is not None and spec.origin is None:
            setattr(import_module(parent), name, module)


sys.meta_path.insert(0, _LoadedMeanwhile())
shardformer, booster = import_from_here("shardformer"), import_from_here("booster")
# Only our part of `plugins`: it is a namespace package that other distributions share, or a foreign package.
_plugin = import_from_here("plugins.hybrid_parallel")
_attach(_plugin, "plugins.hybrid_parallel")


def take_over() -> None:
    """Have the script that this interpreter starts run under the layout of `BOOSTER_LAYOUT`; see `booster.takeover`."""
    import_from_here("booster.takeover").install()


def __getattr__(name: str) -> Any:
    """Look up a public name of `booster` or `plugins.hybrid_parallel`."""
    for module in (booster, _plugin):
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"booster", "shardformer", *booster.__all__, *_plugin.__all__})
