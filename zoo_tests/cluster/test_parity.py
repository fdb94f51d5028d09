"""Training across machines against plain training: layouts, the place of the axes, and names that mislead.

What breaks here first: the address that gloo or the rendezvous takes (`booster/network.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zoo_tests.cluster.cluster import Cluster
from zoo_tests.cluster.namespaces import Process, problem
from zoo_tests.cluster.parity_job import CASES, reports_of
from zoo_tests.harness.compare import check_reports

pytestmark = pytest.mark.skipif(problem() is not None, reason=problem() or "")
JOB = Path(__file__).with_name("parity_job.py")
DRIVER = Path(__file__).with_name("ray_driver.py")
_LIMIT_S = 300
# Axis -> whether it lies on one machine, of two with two ranks each; axes of one rank are left out.
_INSIDE = {
    "tp2dp2": {"tp": True, "dp": False},
    "tp2pp2": {"tp": True, "pp": False},
    "cp2dp2": {"cp": True, "dp": False},
    "dp4": {"dp": False},
    "dp4 zero3": {"dp": False},
    "pp4": {"pp": False},
    "tp4": {"tp": False},
}


def assert_trained(jobs: list[Process], folder: Path, names: list[str]) -> str:
    """All agents ended well, and every layout trained as one process does; return what the first agent said."""
    codes = [job.wait(_LIMIT_S) for job in jobs]
    assert codes == [0] * len(jobs), "\n".join(job.err[-3000:] for job in jobs)
    for name in names:
        reports, places = reports_of(folder, name)
        check_reports(CASES[name], reports, folder / name)
        for place in places:
            found = {axis: len(machines) == 1 for axis, machines in place.items() if axis in _INSIDE[name]}
            assert found == _INSIDE[name], f"{name}: {place}"
    return "".join(job.err for job in jobs)


@pytest.mark.campaign
def test_two_machines_whose_names_mislead(tmp_path: Path) -> None:
    """One machine's name is 127.0.1.1 to itself, the other's is unknown to itself; no interface is set."""
    names = list(CASES)
    with Cluster(2, shared=tmp_path, own_names=("127.0.1.1", "")) as cluster:
        said = assert_trained(cluster.start_job(2, str(JOB), str(tmp_path), *names), tmp_path, names)
    assert "mesh: dp 2 x tp 2 on 2 machines; tp stays inside a machine, dp crosses machines\n" in said
    assert "mesh: pp 4 on 2 machines; pp crosses machines\n" in said
    assert said.count("tp_size=4 puts the tensor-parallel group of ranks 0 to 3 on 2 machines") == 1
    assert "a machine has 2 of the ranks, so use tp_size=2, and pp_size for the rest" in said


@pytest.mark.campaign
def test_four_machines_by_torchrun(tmp_path: Path) -> None:
    """One rank for each machine."""
    names = ["pp4", "dp4 zero3"]
    with Cluster(4, shared=tmp_path) as cluster:
        jobs = cluster.start_job(1, str(JOB), str(tmp_path), *names, launcher="torchrun")
        assert_trained(jobs, tmp_path, names)


@pytest.mark.campaign
def test_ray_on_two_machines(tmp_path: Path) -> None:
    """Ray starts the ranks and makes their process group."""
    pytest.importorskip("ray")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": str(_LIMIT_S)}
    ray = (str(Path(sys.executable).with_name("ray")), "start", "--num-cpus", "3", "--object-store-memory", "80000000")
    with Cluster(2, shared=tmp_path) as cluster:
        first, second = cluster.machines
        head = ("--head", "--port", "6379", "--include-dashboard", "false", "--node-ip-address", first.address)
        first.run(*ray, *head, limit_s=_LIMIT_S, **quiet)
        joins = ("--address", f"{first.address}:6379", "--node-ip-address", second.address)
        second.run(*ray, *joins, limit_s=_LIMIT_S, **quiet)
        driver = first.start(sys.executable, str(DRIVER), str(tmp_path), "tp2dp2", "dp4 zero3", **quiet)
        assert_trained([driver], tmp_path, ["tp2dp2", "dp4 zero3"])
