"""torchrun and `booster run` with two agents, each a machine: static and elastic rendezvous, kills and late machines.

What fails here first is how ranks of a later round tell its keys in torchrun's store from earlier ones; look at
`booster/elastic/job_environment.py`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from zoo_tests.booster.cli.started import Ended, Started
from zoo_tests.booster.clusters.job import STEPS, plain_losses
from zoo_tests.harness.ports import free_port
from zoo_tests.harness.ranks import under_load

JOB = Path(__file__).with_name("job.py")
LAUNCHERS = {"torchrun": (str(Path(sys.executable).with_name("torchrun")),), "booster run": ("-m", "booster", "run")}
EXACT = {"rel": 1e-6, "abs": 0}


def agent(
    launcher: str, rendezvous: tuple[str, ...], folder: Path, *options: str, environment: dict[str, str] | None = None
) -> Started:
    """One machine's part of a job of a rank for each machine."""
    common = ("--nproc-per-node", "1", "--max-restarts", "2")
    return Started(*LAUNCHERS[launcher], *common, *rendezvous, str(JOB), str(folder), *options, **(environment or {}))


def static(port: str) -> list[tuple[str, ...]]:
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    return [(*place, "--node-rank", str(node)) for node in range(2)]


def elastic(port: str, *conf: str) -> list[tuple[str, ...]]:
    place = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", "127.0.0.1")
    return [(*place, "--rdzv-endpoint", f"127.0.0.1:{port}", *conf)] * 2


RENDEZVOUS = {"static": static, "elastic": elastic}


def assert_trained(folder: Path, results: list[Ended]) -> list[int]:
    """The losses are those of a plain loop; return the number of ranks of each step."""
    assert [result.code for result in results] == [0, 0], "\n".join(result.err for result in results)
    result = json.loads((folder / "result.json").read_text())
    assert result["losses"] == pytest.approx(plain_losses(), **EXACT)
    return result["worlds"]


def run_with_a_kill(launcher: str, rendezvous: str, folder: Path) -> None:
    jobs = [agent(launcher, place, folder, "--dies-after", "3") for place in RENDEZVOUS[rendezvous](free_port())]
    results = [job.ended() for job in jobs]
    assert assert_trained(folder, results) == [2] * STEPS
    assert (folder / "disturbed").exists(), "no rank was killed"
    said = "".join(result.err for result in results)
    assert said.count("error: rank 1 was ended by SIGKILL") == 1, said
    assert said.count("mesh: dp 2 on 2 machines; dp crosses machines\n") == 2, "once for each round"


@pytest.mark.campaign
def test_a_rank_killed_under_torchruns_elastic_rendezvous(tmp_path: Path) -> None:
    """One agent may count a failure and the other a change of machines: both join the same round."""
    run_with_a_kill("torchrun", "elastic", tmp_path)


@pytest.mark.campaign
def test_static_rendezvous_of_booster_run(tmp_path: Path) -> None:
    jobs = [agent("booster run", place, tmp_path) for place in static(free_port())]
    assert assert_trained(tmp_path, [job.ended() for job in jobs]) == [2] * STEPS


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("launcher", "rendezvous"), [("torchrun", "static"), ("booster run", "static"), ("booster run", "elastic")]
)
def test_a_killed_rank(launcher: str, rendezvous: str, tmp_path: Path) -> None:
    run_with_a_kill(launcher, rendezvous, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_machine_that_comes_late(launcher: str, tmp_path: Path) -> None:
    """A job of one machine goes on with two, from its checkpoint; agents count no failure then."""
    # A job that could start with one machine waits this long for others.
    place, same = elastic(free_port(), "--rdzv-conf", "last_call_timeout=2")
    # torchrun needs the variable for this, which `booster run` sets.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if launcher == "torchrun" else {}
    first = agent(launcher, place, tmp_path, "--waits-after", "3", environment=environment)
    limit = time.monotonic() + under_load(60)
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < limit and first.process.poll() is None, first.killed().err
        time.sleep(0.1)
    second = agent(launcher, same, tmp_path, environment=environment)
    assert assert_trained(tmp_path, [first.ended(), second.ended()]) == [1] * 3 + [2] * (STEPS - 3)
