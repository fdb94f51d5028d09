"""`booster run` with jobs that end well and badly.

What fails here first is how an error reaches the other ranks: look at `booster/failure/`, and at `booster/cli/run.py`
for what the launcher makes of it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import pytest
import torch

from booster.cli import run
from zoo_tests.booster.cli.job import SENTENCE
from zoo_tests.booster.cli.started import Ended, Started, start_alone, start_job
from zoo_tests.harness.ports import free_port
from zoo_tests.harness.ranks import under_load

LIMIT_S = 3.0
CTRL_C_LIMIT_S = 6.0


def assert_no_noise(result: Ended) -> None:
    """No report of the launcher on top of what the ranks said."""
    for noise in ("ChildFailedError", "closing signal", "elastic", "Setting OMP_NUM_THREADS"):
        assert noise not in result.err


@pytest.mark.parametrize(("gpus", "chosen"), [(1, None), (0, None), (1, "max_split_size_mb:64")])
def test_memory_of_gpus_grows_in_place_unless_the_user_has_chosen(
    gpus: int, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {} if chosen is None else {"PYTORCH_CUDA_ALLOC_CONF": chosen}
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    run._choose_allocator()
    is_set = gpus and chosen is None
    assert os.environ == (given | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if is_set else given)


@pytest.mark.slow
def test_all_ranks_join_alike_and_an_error_that_the_script_handles_ends_nothing() -> None:
    result = start_job("handled", "all").ended()
    assert (result.code, result.err) == (0, "")
    said = sorted(re.findall(r"rank (\d): pid \d+, met (\d), random (\S+), threads (\d+)", result.out))
    assert [(rank, met, threads) for rank, met, _, threads in said] == [("0", "2", "1"), ("1", "2", "1")]
    assert said[0][2] == said[1][2], "the ranks are not seeded alike"


@pytest.mark.slow
def test_uncaught_error_ends_all_ranks() -> None:
    result = start_job("uncaught", "1").ended()
    assert result.code == 1
    assert result.seconds < LIMIT_S
    assert result.err.count("Traceback") == 1
    assert "[rank1]: IndexError: sample 7 is" in result.err
    assert_no_noise(result)


@pytest.mark.slow
def test_error_in_guard_ends_ranks_whose_main_threads_are_blocked() -> None:
    result = start_job("in_guard", "1", num_ranks=4).ended()
    assert (result.code, result.err) == (
        1,
        "error on rank 1 in booster.execute_pipeline: IndexError: sample 7 is missing\n",
    )
    assert result.seconds < LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("where", ["all", "1"])
def test_users_mistake_is_one_line(where: str) -> None:
    result = start_job("mistake", where).ended()
    assert result.code == 1 and re.fullmatch(rf"error: {SENTENCE} \(\S+job.py, line \d+\)\n", result.err)
    assert result.seconds < LIMIT_S


@pytest.mark.slow
def test_rank_ended_by_a_signal_is_named() -> None:
    result = start_job("killed", "1").ended()
    assert result.code == 137
    assert result.err.startswith("error: rank 1 was ended by SIGKILL before its first operation; rank 0 was ")
    assert result.err.endswith("; if no one sent SIGKILL, the system ran out of memory\n")
    assert result.err.count("\n") == 1
    assert_no_noise(result)


@pytest.mark.slow
def test_exit_code_of_the_script_is_the_commands() -> None:
    result = start_job("own_code", "all").ended()
    assert result.code == 7
    assert re.fullmatch(r"error: rank [01] ended with exit code 7, which ended the job\n", result.err), result.err


@pytest.mark.slow
def test_a_rank_that_ends_by_itself_is_named_with_its_exit_code() -> None:
    """By the others if they get to it, else by the command."""
    result = start_job("own_code", "1").ended()
    assert result.code == 7
    assert re.fullmatch(
        r"error: rank 1 (ended with exit code 7|called sys\.exit\(7\): it .*has ended)[^\n]*\n", result.err
    )


@pytest.mark.parametrize("start", [pytest.param(start_job, marks=pytest.mark.slow), start_alone])
def test_ctrl_c_ends_all_ranks(start: Callable[[str, str], Started]) -> None:
    job = start("long", "0")
    job.interrupt()
    result = job.ended()
    assert (result.code, result.err) == (130, "interrupted\n")
    assert result.seconds < under_load(CTRL_C_LIMIT_S)


@pytest.mark.slow
def test_script_alone_is_a_job_of_one_rank() -> None:
    result = start_alone("nothing").ended()
    assert (result.code, result.err) == (0, "")
    assert "met 1," in result.out


@pytest.mark.slow
def test_users_mistake_in_one_process() -> None:
    result = start_alone("mistake").ended()
    assert result.code == 1 and re.fullmatch(rf"error: {SENTENCE} \(\S+job.py, line \d+\)\n", result.err)


@pytest.mark.slow
def test_half_set_environment_is_refused() -> None:
    result = start_alone("nothing", RANK="0", LOCAL_RANK="0").ended()
    assert result.code == 1
    assert result.err.startswith(
        "error: RANK and LOCAL_RANK are set but not WORLD_SIZE, MASTER_ADDR and MASTER_PORT; "
        "set all, or start the script with `booster run --nproc-per-node N` or torchrun (zoo_tests"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("happening", "failing"), [("in_guard", 1), ("uncaught", 0)])
def test_ranks_without_a_launcher_end_too(happening: str, failing: int) -> None:
    """Rank 0 holds the store itself here, and nothing but the store tells the other rank."""
    port = free_port()
    jobs = [start_alone(happening, str(failing), HAND_RANK=str(rank), HAND_PORT=port) for rank in range(2)]
    other = jobs[1 - failing].ended()
    ended_at = time.time()
    failed = jobs[failing].killed()
    assert other.code == 1
    assert ended_at - failed.happened < LIMIT_S
    assert f"error on rank {failing}" in other.err
    assert "IndexError: sample 7 is missing" in other.err
