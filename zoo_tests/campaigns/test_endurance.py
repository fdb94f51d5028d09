"""Hundreds of steps leave nothing behind; `python -m zoo_tests.campaigns.endurance` trains longer, in every layout.

What breaks here first: a hook or a cache that keeps a step's graph, or a file that is never closed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.campaigns.endurance import KINDS, endure, slopes
from zoo_tests.harness.ranks import run_on_ranks

# The most that a step may add: so few steps tell memory that leaks from memory that is kept for the next step only
# roughly. A step that kept its graph added 130 KB and 80 objects.
_MOST = dict(zip(KINDS, (40.0, 10.0, 0.1, 0.02, 2.0), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ZeRO-3", "zbv"])
def test_three_hundred_steps_leave_nothing_behind(name: str, tmp_path: Path) -> None:
    for looks in run_on_ranks(2, endure, name, 300, 30, tmp_path, timeout_s=600.0):
        found = slopes(looks, 30)
        assert all(found[kind] < most for kind, most in _MOST.items()), found
