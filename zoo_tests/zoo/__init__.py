"""The zoo: one small file for families that are alike, each with its `FAMILIES` (name in tests -> family)."""

import importlib
import pkgutil

from zoo_tests.zoo.base import Batch, Family, Head


def _collect() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {name: family for module in modules for name, family in getattr(module, "FAMILIES", {}).items()}


FAMILIES: dict[str, Family] = _collect()

__all__ = ["FAMILIES", "Batch", "Family", "Head"]
