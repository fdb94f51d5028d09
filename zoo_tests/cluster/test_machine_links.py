"""Connections between machines, by which a cut is named, whichever end of the cable it is at."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from zoo_tests.cluster.cluster import Cluster
from zoo_tests.cluster.links import Direction
from zoo_tests.cluster.namespaces import problem

pytestmark = [pytest.mark.skipif(problem() is not None, reason=problem() or ""), pytest.mark.slow]
JOB = Path(__file__).with_name("watch_links.py")
_LIMIT_S = 2


@pytest.mark.parametrize("direction", ["both", "out", "in"])
def test_a_machine_whose_own_cable_is_cut_names_the_other(direction: Direction, tmp_path: Path) -> None:
    """The kernel does not count probes that never leave the machine."""
    with Cluster(2, shared=tmp_path) as cluster:
        jobs = [
            machine.start(sys.executable, str(JOB), str(tmp_path / "store"), str(rank), str(_LIMIT_S))
            for rank, machine in enumerate(cluster.machines)
        ]
        assert all(job.wait_for(lambda job=job: "connected" in job.out, 120) for job in jobs), jobs[0].err
        time.sleep(2 * _LIMIT_S)
        assert not any("error" in job.out for job in jobs)
        cluster.machines[0].link.cut(direction)
        assert all(job.wait_for(lambda job=job: "error" in job.out, 20) for job in jobs)
    assert "error: rank 1 on machine node2 cannot be reached from machine node1 for 2 s" in jobs[0].out
    assert "error: rank 0 on machine node1 cannot be reached from machine node2 for 2 s" in jobs[1].out
