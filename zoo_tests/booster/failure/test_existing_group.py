"""A process group that was there before: ranks are watched as in one of ours, and it is left as it is.

What breaks here first is in `booster/launch.py`: the group is taken for ours, or its ranks are not watched.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from booster.launch import launch_from_torch
from zoo_tests.harness.ended_ranks import run_to_the_end

_LONGER_THAN_A_LOSS_S = 3.5  # ranks that have lost their store end after 2 s


def _sum_over_ranks() -> float:
    value = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(value)
    return float(value)


def _use_group_after_our_exit() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    # Handlers run in the order in which they were registered, the last one first.
    atexit.register(lambda: print("at exit", _sum_over_ranks(), dist.group.WORLD is group, flush=True))
    launch_from_torch()
    launch_from_torch()
    print("in use", _sum_over_ranks(), dist.group.WORLD is group, flush=True)


@pytest.mark.slow
def test_a_group_outlives_ours(tmp_path: Path) -> None:
    for rank in run_to_the_end(2, _use_group_after_our_exit, folder=tmp_path):
        assert (rank.code, rank.err) == (0, "")
        assert rank.out == "in use 3.0 True\nat exit 3.0 True\n"


def _destroy_group_and_go_on(is_given: bool) -> None:
    if is_given:
        dist.init_process_group("gloo")
    launch_from_torch()
    dist.destroy_process_group()
    time.sleep(_LONGER_THAN_A_LOSS_S)


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [True, False])
def test_a_script_may_destroy_the_group_early(is_given: bool, tmp_path: Path) -> None:
    """Rank 0 holds the store, which went with the group."""
    for rank in run_to_the_end(2, _destroy_group_and_go_on, is_given, folder=tmp_path):
        assert (rank.code, rank.err) == (0, "")


def _raise_on_rank_1() -> None:
    dist.init_process_group("gloo")
    launch_from_torch()
    if dist.get_rank() == 1:
        raise IndexError("sample 7 is missing")
    _sum_over_ranks()


@pytest.mark.slow
def test_an_error_ends_all_ranks(tmp_path: Path) -> None:
    waiting, failed = run_to_the_end(2, _raise_on_rank_1, folder=tmp_path)
    assert (waiting.code, waiting.err) == (1, "error on rank 1: IndexError: sample 7 is missing\n")
    assert failed.code == 1
    assert "IndexError: sample 7 is missing" in failed.err
