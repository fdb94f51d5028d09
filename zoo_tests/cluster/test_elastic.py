"""An elastic job on two machines, of which the first, which holds the rendezvous, loses its power."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zoo_tests.cluster.cluster import PORT, Cluster
from zoo_tests.cluster.namespaces import problem
from zoo_tests.elastic import small_job
from zoo_tests.elastic.driver import lines_of

pytestmark = [pytest.mark.skipif(problem() is not None, reason=problem() or ""), pytest.mark.campaign]
_STEPS = 40
_LIMIT_S = 300


def test_the_rest_goes_on_without_the_machine_of_the_rendezvous(tmp_path: Path) -> None:
    """No connection is closed: the second machine hears nothing any more."""
    with Cluster(2, shared=tmp_path) as cluster:
        endpoints = ",".join(f"{machine.address}:{PORT}" for machine in cluster.machines)
        command = [sys.executable, "-m", "booster", "run", "--elastic", "--min-ranks", "2", "--max-ranks", "4"]
        command += ["--nproc-per-node", "2", "--rdzv-endpoint", endpoints, "--rdzv-conf", "last_call_timeout=200"]
        command += [small_job.__file__, str(tmp_path), str(_STEPS), "0.3"]
        first, second = (machine.start(*command, OMP_NUM_THREADS="1") for machine in cluster.machines)
        assert second.wait_for(lambda: len(lines_of(tmp_path / "losses")) > 3, _LIMIT_S), first.err + second.err
        cluster.machines[0].lose_power()
        assert second.wait(_LIMIT_S) == 0, second.err
    found = {(step, ranks): loss for step, loss, ranks in lines_of(tmp_path / "losses")}
    assert {ranks for _, ranks in found} == {4, 2}, second.err
    assert {step for step, _ in found} == set(range(1, _STEPS + 1))
    expected = small_job.plain_losses(_STEPS)
    assert all(abs(loss - expected[step - 1]) < 1e-12 for (step, _), loss in found.items())
    assert (
        f"elastic: the machine that holds the rendezvous, {endpoints.partition(',')[0]}, does not answer" in second.err
    )
