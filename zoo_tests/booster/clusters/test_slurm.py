"""The batch scripts of `examples/clusters` on a stand-in for SLURM: two nodes train, are taken away, and go on.

What fails here first is the way of a signal: from SLURM to the script, `srun`, torchrun's agent and the ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo_tests.booster.clusters.job import STEPS, plain_losses
from zoo_tests.booster.clusters.slurm import Cluster
from zoo_tests.harness.environment import REPOSITORY

JOB = Path(__file__).with_name("job.py")
SCRIPTS = REPOSITORY / "examples" / "clusters"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, tasks_per_node=1)


def assert_trained(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert result["losses"] == pytest.approx(plain_losses(), rel=1e-6, abs=0)
    assert result["worlds"] == [2] * STEPS


def run_with_a_notice(cluster: Cluster, script: str, folder: Path) -> None:
    code, output = cluster.run(SCRIPTS / script, JOB, folder, "--notice-after", 3, notice=folder / "disturbed")
    assert code == 0, output
    assert cluster.log.read_text() == f"requeue {cluster.job}\n", output
    assert {path.name for path in folder.glob("step-*")} == {"step-2", "step-3"}, "saved when it had to end"
    assert not (folder / "result.json").exists()
    code, output = cluster.run(SCRIPTS / script, JOB, folder, "--notice-after", 3)
    assert code == 0, output
    assert_trained(folder)
    assert cluster.log.read_text().count("\n") == 1


@pytest.mark.campaign
def test_an_agent_on_each_node(cluster: Cluster, tmp_path: Path) -> None:
    code, output = cluster.run(SCRIPTS / "slurm_agents.sbatch", JOB, tmp_path / "run", "--tp", "2")
    assert code == 0, output
    assert_trained(tmp_path / "run")
    assert "mesh: tp 2 on 2 machines; tp crosses machines\n" in output


@pytest.mark.campaign
def test_a_rank_a_task_and_a_notice(cluster: Cluster, tmp_path: Path) -> None:
    run_with_a_notice(cluster, "slurm_ranks.sbatch", tmp_path / "run")


@pytest.mark.campaign
def test_an_agent_on_each_node_and_a_notice(cluster: Cluster, tmp_path: Path) -> None:
    run_with_a_notice(cluster, "slurm_agents.sbatch", tmp_path / "run")


@pytest.mark.slow
def test_a_failed_rank_is_the_jobs_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys; sys.exit(7)")
    code, output = cluster.run(SCRIPTS / "slurm_ranks.sbatch", tmp_path / "fails.py")
    assert code == 7, output
    assert not cluster.log.exists(), "a failed job is not queued again"
