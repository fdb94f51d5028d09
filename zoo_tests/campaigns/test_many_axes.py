"""Three axes at once train like plain training, each set of them once; `campaigns.many_axes` tries more of them.

What breaks here first: a group of ranks that counts what another axis has counted already.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.campaigns.many_axes import case_of, sets_of_axes
from zoo_tests.harness.compare import check_case


@pytest.mark.slow
@pytest.mark.parametrize("axes", sets_of_axes([3]), ids="-".join)
def test_three_axes_train_like_plain_training(axes: tuple[str, ...], tmp_path: Path) -> None:
    check_case(case_of(axes), tmp_path)
