"""Every row of the table in `docs/boosted_model.md`, against the plain model: its numbers, or one sentence.

What breaks here first: something done to the wrapper that the model inside does not see. Look in
`plugins/hybrid_parallel/boosted/model_api.py` and `plugins/hybrid_parallel/guards.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.docs.pages import REPOSITORY, rows_of
from zoo_tests.harness.case import LAYOUTS
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.hybrid_parallel.boosted.rows_of_engines import ROWS_OF_ENGINES
from zoo_tests.hybrid_parallel.boosted.rows_of_models import ROWS_OF_MODELS
from zoo_tests.hybrid_parallel.boosted.sides import Sides

_ROWS = {**ROWS_OF_MODELS, **ROWS_OF_ENGINES}
_CUT_ALONE = {"push_to_hub"}  # with whole weights it uploads
# Rows whose answer depends on whether replicas share the batch.
_ON_REPLICAS = {
    "attributes",
    "state_dict",
    "load_state_dict",
    "save_pretrained",
    "AveragedModel",
    "clip_grad_norm_",
    "register_hook",
    "register_full_backward_hook",
    "autograd.grad",
    "functional_call",
    "as DistributedDataParallel",
    "penalty",
    "to",
}


def _run(row: str, layout: str, folder: str) -> None:
    _ROWS[row](Sides(layout, folder))


def _params() -> list:
    rows = [(row, layout) for layout in ("tp2", "pp2") for row in _ROWS]
    slow = [(row, "dp2") for row in _ROWS if row not in _ON_REPLICAS | _CUT_ALONE]
    every = [*rows, *((row, "dp2") for row in _ROWS if row in _ON_REPLICAS)]
    return [*every, *(pytest.param(*each, marks=pytest.mark.slow) for each in slow)]


@pytest.mark.parametrize(("row", "layout"), _params())
def test_each_row_of_the_table(row: str, layout: str, tmp_path: Path) -> None:
    run_on_ranks(LAYOUTS[layout].world_size, _run, row, layout, str(tmp_path))


def test_the_table_has_these_rows() -> None:
    assert [row for row, *_ in rows_of(REPOSITORY / "docs" / "boosted_model.md", "Row")] == list(_ROWS)
