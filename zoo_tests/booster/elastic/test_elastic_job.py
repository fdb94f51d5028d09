"""Real jobs: a rank is killed, the rest go on, and another takes its place; what cannot go on keeps its state."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.elastic import small_job
from zoo_tests.elastic.driver import ElasticJob, free_port, wrong_steps
from zoo_tests.harness.environment import environment_of_a_job
from zoo_tests.harness.ranks import under_load

_STEPS, _MANY = 80, 300
_LIMIT_S = 240.0
# A job of many steps outlasts two agents: one that comes after its end would hold the rendezvous itself.
_SLOW_STEP_S = 2 * _LIMIT_S / _MANY
_SCRIPT = Path(small_job.__file__)


@contextmanager
def _job(folder: Path, *options: str, steps: int = _STEPS, **values: Any) -> Iterator[ElasticJob]:
    """Three ranks on one machine."""
    job = ElasticJob(folder, steps, (3,), options, max_ranks=3, script=_SCRIPT, limit_s=_LIMIT_S, **values)
    try:
        yield job
    finally:
        job.close()


@pytest.mark.slow
def test_a_killed_rank_is_left_out_and_replaced(tmp_path: Path) -> None:
    with _job(tmp_path, "--rejoin-after", "8") as job:  # longer than a busy machine takes for a round
        job.wait_for_step(4)  # in the second epoch
        job.signal_rank(1)
        job.wait(lambda: job.num_ranks() == 2, "round of two ranks")
        job.wait(lambda: job.num_ranks() == 3, "round of three ranks")
        assert job.ended() == 0, job.log()
    assert not wrong_steps(job, small_job.plain_losses(_STEPS), 1e-12), job.log()
    assert {world_size for _, _, world_size in job.losses()} == {2, 3}
    assert "elastic: rank 1 was ended by SIGKILL" in job.log()
    assert "elastic: 2 of 3 ranks are there; layout tp 1 x pp 1 x dp 2" in job.log()


@pytest.mark.campaign  # `test_command.py` has its sentences
def test_too_few_ranks_for_any_layout_end_the_job_and_a_new_start_goes_on(tmp_path: Path) -> None:
    """In the meantime, machines of other jobs and other versions are sent away."""
    endpoint = f"127.0.0.1:{free_port()}"
    layouts = json.dumps([{"elastic_layouts": [{"zero_stage": 2, "zero_size": 3}]}])
    values = {"min_ranks": 1, "step_s": _SLOW_STEP_S, "environment": {"JOB_LAYOUTS": layouts}}
    with _job(tmp_path, "--rdzv-endpoint", endpoint, steps=_MANY, **values) as job:
        job.wait_for_step(3)
        other = _further_agent(tmp_path, endpoint, "--rdzv-id", "other")
        newer = _further_agent(tmp_path, endpoint, PYTHONPATH=_with_another_version(tmp_path / "packages"))
        assert _said_to(other) == (
            f"error: another job (--rdzv-id elastic) is at {endpoint}; give each job an --rdzv-endpoint of its own"
        )
        said = _said_to(newer)
        assert said.startswith(f"error: the job at {endpoint} has the hybrid-booster ")
        assert "and this machine 99.0; start the same on all machines" in said
        job.signal_rank(2)
        assert job.ended() == 1, job.log()
    assert "error: no layout fits 2 ranks or fewer; start more agents, or give elastic_layouts one" in job.log()
    assert "error: the job has failed; the state of this machine is in " in job.log()
    with _job(tmp_path, steps=_MANY, step_s=0.0) as again:
        assert again.ended() == 0, again.log()
    assert not wrong_steps(again, small_job.plain_losses(_MANY), 1e-12), again.log()
    assert [step for step, *_ in again.losses()].count(1) == 1, "the job began anew"


def _further_agent(folder: Path, endpoint: str, *options: str, **environment: str) -> subprocess.Popen:
    """An agent that wants to join."""
    command = [sys.executable, "-m", "booster", "run", "--elastic", "--min-ranks", "1", "--max-ranks", "3", *options]
    command += ["--rdzv-endpoint", endpoint, "--nproc-per-node", "1"]
    command += [str(_SCRIPT), str(folder), str(_MANY), str(_SLOW_STEP_S)]
    return subprocess.Popen(command, env=environment_of_a_job(**environment), stderr=subprocess.PIPE, text=True)


def _said_to(agent: subprocess.Popen) -> str:
    """What an agent is told, which must end."""
    _, said = agent.communicate(timeout=under_load(_LIMIT_S))
    assert agent.returncode != 0
    return next(line for line in said.splitlines() if line.startswith("error"))


def _with_another_version(folder: Path) -> str:
    """A folder for the module path in which this package has another version."""
    inside = folder / "hybrid_booster-99.0.dist-info"
    inside.mkdir(parents=True)
    (inside / "METADATA").write_text("Metadata-Version: 2.1\nName: hybrid-booster\nVersion: 99.0\n")
    return f"{folder}:{environment_of_a_job()['PYTHONPATH']}"
