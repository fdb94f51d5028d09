"""The pool of ranks itself. If this fails, no other result of tests on ranks means anything."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zoo_tests.harness.ranks import RankError, distributed, run_on_ranks, under_load


@pytest.mark.parametrize("value", [1.0, 2.0])
@distributed(2)
def test_body_runs_on_every_rank_with_parameters_and_fixtures(value: float, tmp_path: Path) -> None:
    total = torch.tensor(value)
    dist.all_reduce(total)
    assert total == 2 * value
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _process_and_random_number() -> tuple[int, int, float]:
    return dist.get_rank(), os.getpid(), torch.rand(()).item()


def test_results_come_in_order_and_processes_stay() -> None:
    first, second = (run_on_ranks(2, _process_and_random_number) for _ in range(2))
    assert [rank for rank, _, _ in first] == [0, 1]
    assert first == second, "the same processes, and every task starts from the same seed"


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("wrong on rank 1 only")
    dist.all_reduce(torch.ones(2))


def test_one_failing_rank_is_reported_soon_and_the_next_task_runs() -> None:
    run_on_ranks(2, _process_and_random_number)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)failed ranks \[1\], unresponsive ranks \[0\].*wrong on rank 1 only"):
        run_on_ranks(2, _fail_on_rank_1)
    assert time.monotonic() - start < under_load(5)
    assert len(run_on_ranks(2, _process_and_random_number)) == 2


def _hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


@pytest.mark.slow
def test_hanging_rank_is_reported_with_its_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)unresponsive ranks \[0\].*_hang_on_rank_0"):
        run_on_ranks(2, _hang_on_rank_0, timeout_s=2.0)


def test_a_limit_counts_the_load_that_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.0])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads, 100.0 * os.cpu_count()), 0.0, 0.0))
    run_on_ranks(2, time.sleep, 0.3, timeout_s=0.1)


def _die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_dead_rank_is_reported() -> None:
    with pytest.raises(RankError, match="exit code 3"):
        run_on_ranks(2, _die_on_rank_0)
