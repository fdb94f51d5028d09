"""Tests of this folder need the simulated device: where it cannot be built, they are skipped with the reason."""

from __future__ import annotations

import pytest

from zoo_tests.simcuda import build


@pytest.fixture(scope="session", autouse=True)
def simulated_device() -> None:
    try:
        build.library()
    except RuntimeError as error:
        pytest.skip(str(error))
