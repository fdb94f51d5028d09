"""A real job: a rank is killed, the rest go on, and another takes its place; no loss changes."""

from __future__ import annotations

from pathlib import Path

from zoo_tests.elastic import small_job
from zoo_tests.elastic.driver import ElasticJob, wrong_steps

_STEPS = 40


def test_a_killed_rank_is_left_out_and_replaced(tmp_path: Path) -> None:
    options = ("--rejoin-after", "0.5")
    script = Path(small_job.__file__)
    job = ElasticJob(tmp_path, _STEPS, (3,), options, max_ranks=3, step_s=0.1, script=script, limit_s=240.0)
    try:
        job.wait_for_step(4)  # in the second epoch
        job.signal_rank(1)
        job.wait(lambda: job.num_ranks() == 2, "round of two ranks")
        job.wait(lambda: job.num_ranks() == 3, "round of three ranks")
        assert job.ended() == 0, job.log()
    finally:
        job.close()
    assert not wrong_steps(job, small_job.plain_losses(_STEPS), 1e-12), job.log()
    assert {world_size for _, _, world_size in job.losses()} == {2, 3}
    assert "elastic: rank 1 was ended by SIGKILL" in job.log()
    assert "elastic: 2 of 3 ranks are there; layout tp 1 x pp 1 x dp 2" in job.log()
