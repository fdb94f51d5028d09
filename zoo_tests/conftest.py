"""What all tests share: the end of the pools of ranks."""

from __future__ import annotations

import pytest

from zoo_tests.ranks import stop_pools


def pytest_sessionfinish(session: pytest.Session) -> None:
    stop_pools()
