"""torchrun's elastic restarts: a killed rank costs a restart from the newest checkpoint, and no number changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.booster.cli.started import Ended, Started

JOB = Path(__file__).with_name("elastic_job.py")


def _run(folder: Path, dies_after: int) -> tuple[Ended, dict[str, Any]]:
    folder.mkdir()
    options = ("--nproc-per-node", "2", "--max-restarts", "2")
    ended = Started("-m", "booster", "run", *options, str(JOB), str(folder), str(dies_after)).ended()
    return ended, json.loads((folder / "losses.json").read_text()) if ended.code == 0 else {}


@pytest.mark.slow
def test_a_killed_rank_leads_to_the_same_losses(tmp_path: Path) -> None:
    whole, expected = _run(tmp_path / "whole", 0)
    assert whole.code == 0, whole.err
    killed, found = _run(tmp_path / "killed", 6)  # in the second of three epochs
    assert killed.code == 0, killed.err
    assert (expected["restarts"], found["restarts"]) == (0, 1)
    assert found["losses"] == expected["losses"] and len(found["losses"]) == 12
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["losses.json", "step-11", "step-12"]
