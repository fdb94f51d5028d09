"""Tests of this folder need a GPU, or `--device simcuda`, which tries them out; they are skipped without either."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.gpu import device

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = None
    if device.chosen() is None:
        skip = pytest.mark.skip(reason=device.problem() or "ranks are on the CPU; use --device gpu")
    for item in items:
        if item.path.parent == _FOLDER:
            item.add_marker(pytest.mark.gpu)
            if skip is not None:
                item.add_marker(skip)
