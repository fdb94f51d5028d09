"""What all tests share: markers, and the end of the pools of ranks."""

from __future__ import annotations

import pytest

from zoo_tests.ranks import stop_pools


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: the long tail, left out by -m 'not slow'")
    config.addinivalue_line("markers", "gpu: needs a GPU")


def pytest_sessionfinish(session: pytest.Session) -> None:
    stop_pools()
