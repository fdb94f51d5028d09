"""Which families a test of all of them runs with in the suite, and which in the campaigns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from zoo_tests.zoo import FAMILIES


def sixth_of_families(which: int, but: Collection[str] = ()) -> list[Any]:
    """Parameters for every family: every sixth one, from number `which` on, is in the suite, the others are campaigns.

    For what is the same code in every family, unless its names differ.
    """
    return _every(6, which, but)


def third_of_families(which: int, but: Collection[str] = ()) -> list[Any]:
    """Parameters for every family: every third one, from number `which` on, is in the suite, the others are campaigns.

    Three tests that take different thirds meet every family once.
    """
    return _every(3, which, but)


def _every(step: int, which: int, but: Collection[str]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.slow if number % step == which else pytest.mark.campaign)
        for number, name in enumerate(FAMILIES)
        if name not in but
    ]
