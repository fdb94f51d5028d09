"""Snapshots in memory, of which a machine's part is lost, against checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.hybrid_parallel.elastic.lost_machine import train
from zoo_tests.hybrid_parallel.elastic.refusals import refused
from zoo_tests.hybrid_parallel.relayout.chain import train as train_with_checkpoints

_LAYOUTS = ["tp2dp2", "pp2dp2", "dp4 stage 3", "tp2pp2", "tp2pp2", "dp4"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
def test_the_bits_of_a_save_and_a_load_after_the_loss_of_a_machine(precision: str, tmp_path: Path) -> None:
    recipe = Recipe(family="llama", head="causal_lm", optimizer="adamw", precision=precision, rows=72)
    runs = run_on_ranks(4, train, recipe, _LAYOUTS, str(tmp_path / "memory"), timeout_s=300.0)
    expected = run_on_ranks(4, train_with_checkpoints, recipe, _LAYOUTS, {}, str(tmp_path / "disk"), timeout_s=300.0)
    for (losses, weights), (on_disk, saved) in zip(runs, expected, strict=True):
        assert losses == on_disk
        assert weights.keys() == saved.keys()
        assert all(torch.equal(weights[name], saved[name]) for name in saved)


@pytest.mark.slow
def test_a_snapshot_that_is_refused_leaves_the_job_as_it_was(tmp_path: Path) -> None:
    for said, is_same in run_on_ranks(4, refused, str(tmp_path)):
        assert len(said) == 6 and is_same
        assert all("the gradients since the last optimizer.step() are no part of a" in each for each in said[::2])
        assert all("a plain DataLoader, which cannot say where it is in its epoch" in each for each in said[1::2])
