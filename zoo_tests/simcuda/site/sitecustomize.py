"""Puts the simulated device into each Python process of a job: for those with this folder in their PYTHONPATH.

`zoo_tests/harness/environment.py` sets it. The device comes with the library under test: other processes stay quick.
"""

from __future__ import annotations

import sys
from typing import Any


class _BeforeTheLibrary:
    """A finder that finds nothing, and loads the device when somebody first asks for the library."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in ("booster", "hybrid_booster"):
            sys.meta_path.remove(self)
            from zoo_tests.simcuda import device

            device.load()


sys.meta_path.insert(0, _BeforeTheLibrary())
