"""torchrun's elastic restarts: a killed rank costs a restart from the newest checkpoint, and no number changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo_tests.booster.cli.elastic_job import train
from zoo_tests.booster.cli.started import Started
from zoo_tests.harness.ranks import run_on_ranks

JOB = Path(__file__).with_name("elastic_job.py")


@pytest.mark.campaign
def test_a_killed_rank_leads_to_the_same_losses(tmp_path: Path) -> None:
    expected, *_ = run_on_ranks(2, train, tmp_path / "whole", 0)
    folder = tmp_path / "killed"
    folder.mkdir()
    options = ("--nproc-per-node", "2", "--max-restarts", "2")
    killed = Started("-m", "booster", "run", *options, str(JOB), str(folder), "6").ended()  # in the second epoch
    assert killed.code == 0, killed.err
    assert json.loads((folder / "losses.json").read_text()) == {"losses": expected, "restarts": 1}
    assert len(expected) == 12
    assert sorted(path.name for path in folder.iterdir()) == ["losses.json", "step-11", "step-12"]
