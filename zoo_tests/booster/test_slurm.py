"""What a task of SLURM is told, and what it makes of it; `clusters/test_slurm.py` trains with it."""

from __future__ import annotations

import pytest

from booster.errors import ConfigurationError
from booster.launch import first_host, tasks_by_node, variables_of_task

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_NODELIST": "gpu[007-008,012]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
RANK = {
    "RANK": "5",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu007",
    "MASTER_PORT": "27688",
}


def test_a_task_is_a_rank() -> None:
    assert variables_of_task(TASK) == RANK


def test_what_the_batch_script_says_wins() -> None:
    given = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29400"}
    assert variables_of_task(TASK | given) == RANK | given


def test_steps_and_jobs_have_ports_of_their_own() -> None:
    ports = {
        variables_of_task(TASK | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"]
        for job in range(70000, 71000)
        for step in range(4)
    }
    assert len(ports) == 4000 and all(10000 <= int(port) < 30000 for port in ports)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # a batch script
        {"SLURM_STEP_ID": "4294967291"},  # the same, as newer versions of SLURM number it
        {"SLURM_PROCID": None},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_what_is_no_task_of_several(changes: dict[str, str | None]) -> None:
    assert variables_of_task(changed(changes)) == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"SLURM_LOCALID": None}, "srun has started this task, but SLURM_LOCALID is not set; set it, or use torchrun"),
        ({"SLURM_STEP_NODELIST": None}, "srun has started this task, but SLURM_NODELIST is not set; set it, or use"),
        ({"SLURM_PROCID": "five"}, "SLURM_PROCID='five' is not a whole number; use the one that srun sets"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4x2"},
            "SLURM_TASKS_PER_NODE='4x2' is no list of numbers of tasks; use one such as 4(x2),1",
        ),
    ],
)
def test_variables_that_make_no_sense(changes: dict[str, str | None], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        variables_of_task(changed(changes))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu3", "gpu1"),
        ("gpu[007-009,012],big1", "gpu007"),
        ("rack[2-3]node[05,07]", "rack2node05"),
        ("node[11,13]-ib", "node11-ib"),
    ],
)
def test_the_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_tasks_by_node() -> None:
    assert tasks_by_node("4(x2),1") == [4, 4, 1]
    assert tasks_by_node("8") == [8]


def changed(changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in (TASK | changes).items() if value is not None}
