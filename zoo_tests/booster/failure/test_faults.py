"""A rank that dies, stops, raises or skips a collective ends the job; one that is only slow does not.

What fails here first is a detection of `booster/failure/monitor.py`, or who is named (`booster/failure/diagnosis.py`).
The jobs are those of `zoo_tests/campaigns/faults`, which repeats them 20 times in all places.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from zoo_tests.campaigns.faults import false_alarms
from zoo_tests.campaigns.faults.campaign import GONE_WITHIN_S, LAYOUTS, NAMED_WITHIN_S, Trial
from zoo_tests.campaigns.faults.watch import Outcome, WatchedJob
from zoo_tests.harness.ports import free_port

FLAT, PIPELINE = LAYOUTS
TRIALS = (
    Trial("killed", "execute_pipeline", 1, PIPELINE),
    pytest.param(Trial("stopped", "step", 2, FLAT), marks=pytest.mark.campaign),
    pytest.param(Trial("raising", "loader", 0, FLAT), marks=pytest.mark.campaign),
    pytest.param(Trial("skipping", "step", 3, FLAT), marks=pytest.mark.campaign),
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
RESTARTING = ("-m", "booster", "run", "--nproc-per-node", "4", "--max-restarts", "1")
FLAT_JSON = '{"tp_size": 2}'


def assert_ended(outcome: Outcome) -> None:
    """In time, with one line, and with nothing left."""
    assert len(outcome.lines) == 1, outcome.err
    assert outcome.named_s < NAMED_WITHIN_S, outcome
    assert outcome.gone_s < GONE_WITHIN_S, outcome
    assert outcome.code != 0


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Callable[..., WatchedJob]]:
    """Starts jobs; none outlives the test."""
    started = []

    def start(*arguments: str, **options: object) -> WatchedJob:
        started.append(WatchedJob(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.fault}-{trial.place}")
def test_a_fault_is_named_and_ends_the_job(trial: Trial) -> None:
    outcome = trial.run()
    assert trial.rank_is_named(outcome), outcome.err
    assert trial.operation_is_named(outcome), outcome.err
    assert_ended(outcome)


@pytest.mark.campaign
def test_a_skipped_collective_that_hangs_nobody_is_found_by_counting(job: Callable[..., WatchedJob]) -> None:
    """The script's own sum pairs up with the library's norm from then on, and the other way round."""
    outcome = job("skipping", "metric", "2", FLAT_JSON, STEP_S="0.5").outcome()
    assert outcome.lines[0].startswith("error: rank 2 skipped a collective: at the end of optimizer.step (call ")
    assert_ended(outcome)


@pytest.mark.campaign
def test_ranks_end_with_the_process_that_holds_the_store(job: Callable[..., WatchedJob]) -> None:
    """Torchrun's agent is killed while the ranks are busy."""
    running = job("nothing", "step", "0", FLAT_JSON, STEP_S="1")
    assert running.wait_for(lambda: running.struck > 0, 300)
    os.kill(running.process.pid, signal.SIGKILL)
    killed_at = time.time()
    outcome = running.outcome()
    assert "lost the job's store at" in outcome.lines[0], outcome.err
    assert len(outcome.lines) == 1, outcome.err
    assert outcome.struck + outcome.named_s - killed_at < NAMED_WITHIN_S
    assert outcome.gone_s < GONE_WITHIN_S


@pytest.mark.campaign
def test_torchrun_starts_the_ranks_again(job: Callable[..., WatchedJob]) -> None:
    """Nothing of the first attempt's failure is taken for one of the second."""
    outcome = job("killed", "step", "1", FLAT_JSON, launcher=RESTARTING).outcome_of_good_end()
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("ends well") == 4
    assert len(outcome.lines) == 1
    assert outcome.lines[0].startswith("error: rank 1 was ended by SIGKILL in optimizer.step (call 3)")


@pytest.mark.campaign
def test_a_rank_that_takes_too_long_is_named_with_the_operation(job: Callable[..., WatchedJob]) -> None:
    """Plain torchrun. Rank 1 is slow, which is no fault; but the others were told to wait for 12 s only."""
    outcome = job("sleeping", "loader", "1", FLAT_JSON, launcher=TORCHRUN, TIMEOUT_S="12").outcome()
    line = outcome.lines[0]
    assert "waited without an answer in " in line, line
    assert "in booster.execute_pipeline (call 4)" in line
    assert "rank 1 is after optimizer.step (call 3)" in line or "rank 1 is in booster.execute_pipeline (call 4)" in line
    assert "timeout_s=12; use launch_from_torch(timeout_s=...)" in line
    assert len(outcome.lines) == 1


def start_by_hand(job: Callable[..., WatchedJob], fault: str, rank: int, **environment: str) -> list[WatchedJob]:
    """Three ranks without a launcher; rank 0 holds the store."""
    port = free_port()
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": port, **environment}
    return [
        job(fault, "step", str(rank), "{}", launcher=(), RANK=str(number), LOCAL_RANK=str(number), **world)
        for number in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=pytest.mark.campaign)])
def test_ranks_without_a_launcher_end_with_rank_0(job: Callable[..., WatchedJob], fault: str) -> None:
    """The store goes, or hangs, with it."""
    ranks = start_by_hand(job, fault, 0)
    outcomes = [one.outcome() for one in ranks]
    lines = [line for outcome in outcomes for line in outcome.lines]
    # How a process has ended is known only until its parent has asked, which is the test here.
    expected = "(was ended by SIGKILL|died)" if fault == "killed" else r"is stopped \(SIGSTOP\)"
    assert len(lines) == 1, lines
    assert re.match(rf"error: rank 0 {expected} in optimizer.step \(call 3\)", lines[0]), lines
    assert all(outcome.code for outcome in outcomes)


@pytest.mark.campaign
def test_a_rank_on_another_machine_that_is_gone_is_named(job: Callable[..., WatchedJob]) -> None:
    """Nobody sees its process; its connections are closed, and it answers no question."""
    outcomes = [one.outcome() for one in start_by_hand(job, "killed", 2, MACHINES="1")]
    lines = [line for outcome in outcomes for line in outcome.lines]
    assert lines[0].startswith("error: rank 2 does not answer any more"), lines
    assert all(outcome.code for outcome in outcomes)


@pytest.mark.campaign
def test_slow_ranks_are_no_fault(job: Callable[..., WatchedJob]) -> None:
    """For 30 s one rank sleeps, all hold the interpreter's lock, one computes, and all processes are stopped."""
    pauses = [("sleeping", "1"), ("holding", "-1"), ("computing", "1")]
    jobs = {fault: job(fault, "execute_pipeline", rank, FLAT_JSON, STEP_S="0.2") for fault, rank in pauses}
    suspended = jobs["suspended"] = job("nothing", "step", "0", FLAT_JSON, STEP_S="0.2")
    assert suspended.wait_for(lambda: suspended.struck > 0, 300)
    suspended.signal_all(signal.SIGSTOP)
    time.sleep(30)
    suspended.signal_all(signal.SIGCONT)
    for pause, running in jobs.items():
        outcome = running.outcome_of_good_end()
        assert (pause, outcome.code, outcome.lines) == (pause, 0, ()), outcome.err
        assert outcome.out.count("ends well") == 4, pause


@pytest.mark.slow
def test_threads_saves_and_profilers_are_no_fault() -> None:
    """A sample of the campaign that counts false alarms, with all kinds of work at once."""
    row, alarms, _ = false_alarms.trial("everything", {"tp_size": 2}, 60)
    assert alarms == ()
    assert row[-2] > 0, "no counts were compared"


def test_the_machine_can_tell() -> None:
    """What the watch needs of the system; without it, only ranks that raise end a job."""
    assert sys.platform == "linux"
    assert os.path.exists("/proc/self/task")
    assert os.path.exists("/proc/self/schedstat")
