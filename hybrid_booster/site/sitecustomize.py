"""The start of each rank of `booster run --layout`, which puts this folder first on `PYTHONPATH`."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from hybrid_booster import take_over

take_over()
sys.path.remove(str(Path(__file__).parent))
# The environment's own module of this name, which this one hides.
spec = PathFinder.find_spec("sitecustomize")
if spec is not None and spec.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sitecustomize"])
