"""hybrid-booster under a name of its own, whatever else lies beside a script.

`booster`, `plugins` and `shardformer` are names that other code uses too: what is called so in the directory of a
script is found before what is installed. This package imports them from where it lies itself, under their own names:

    from hybrid_booster import Booster, HybridParallelPlugin, launch_from_torch, shardformer
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PLACE = Path(__file__).resolve().parents[1]


def _import_from_here(name: str) -> ModuleType:
    """Import a package from beside this one, under its own name.

    Raises:
        ImportError: another package of that name was imported before, or there is none here.
    """
    *parents, last = name.split(".")
    own = _PLACE.joinpath(*parents)
    found = sys.modules.get(name)
    if found is not None:
        place = Path(found.__file__ or next(iter(found.__path__))).resolve()
        if place.parent != own / last:
            raise ImportError(
                f"'{name}' is {place} in this process, and not hybrid-booster's; import hybrid_booster before it, or "
                "rename it",
                name=name,
            )
        return found
    spec = PathFinder.find_spec(name, [str(own)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{own / last} does not exist; install hybrid-booster anew", name=name)
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attach(module: ModuleType) -> None:
    """Let `plugins.hybrid_parallel` be read as an attribute, where `plugins` is the namespace that it should be."""
    parent, _, name = module.__name__.rpartition(".")
    with suppress(ValueError):  # somebody has put a module there that came from nowhere
        spec = find_spec(parent)
        if spec is not None and spec.origin is None:
            setattr(import_module(parent), name, module)


shardformer, booster = _import_from_here("shardformer"), _import_from_here("booster")
# Of `plugins` only our part: it is shared with others, or somebody else's.
_plugin = _import_from_here("plugins.hybrid_parallel")
_attach(_plugin)


def __getattr__(name: str) -> Any:
    """What `booster` and `plugins.hybrid_parallel` offer."""
    for module in (booster, _plugin):
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"booster", "shardformer", *booster.__all__, *_plugin.__all__})
