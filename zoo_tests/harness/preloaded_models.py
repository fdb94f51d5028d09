"""Imported by the server that forks ranks where many tests are to run: the models of all families.

Each rank would otherwise import those of every family that it trains, in a second altogether.
"""

from __future__ import annotations

import importlib

from zoo_tests.zoo import FAMILIES

for _family in FAMILIES.values():
    _library = importlib.import_module(_family.module)
    for _head in _family.heads.values():
        getattr(_library, _head.model_class)  # transformers imports a model when it is first asked for
