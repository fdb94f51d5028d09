"""A task of a SLURM job step as a rank: what SLURM's variables say, in the variables of torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from booster.errors import ConfigurationError

_STEPS = ("SLURM_STEP_ID", "SLURM_STEPID")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_ORDINARY_STEPS = 2**32 - 16  # SLURM counts the batch script and interactive shells from the other end
_FIRST_PORT, _NUM_PORTS = 10000, 20000  # below those that Linux gives to outgoing connections
_STEPS_OF_A_JOB = 8  # that run at the same time on one node, each with its own port


def variables_of_task(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for the task that this process is; none if it is no task of several.

    A batch script, and a shell of `salloc`, have the variables of a task but are none: only `srun` starts tasks.
    `MASTER_ADDR` and `MASTER_PORT` are those of the environment, otherwise the first node of the step, and a port that
    follows from the numbers of job and step.

    Raises:
        ConfigurationError: a variable is missing or invalid.
    """
    step = _first(environment, _STEPS)
    if step is None or "SLURM_PROCID" not in environment or int(step) >= _ORDINARY_STEPS:
        return {}
    num_tasks = _integer(environment, *_NUM_TASKS)
    if num_tasks < 2:
        return {}
    variables = {
        "RANK": str(_integer(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(_integer(environment, "SLURM_LOCALID")),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(_value(environment, *_NODES)),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(_integer(environment, "SLURM_JOB_ID"), int(step))),
    }
    if "SLURM_NODEID" in environment:
        node = _integer(environment, "SLURM_NODEID")
        counts = tasks_by_node(_value(environment, *_TASKS))
        variables |= {"GROUP_RANK": str(node), "LOCAL_WORLD_SIZE": str(counts[node])}
    return variables


def first_host(nodes: str) -> str:
    """Return the first host of a list in SLURM's short form: `gpu007` of `gpu[007-009,012],big1`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def tasks_by_node(tasks: str) -> list[int]:
    """Return the number of tasks of each node from SLURM's short form: 4, 4 and 1 of `4(x2),1`."""
    found: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigurationError(f"{_TASKS[1]}='{tasks}' is no list of numbers of tasks; use one such as 4(x2),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _port(job: int, step: int) -> int:
    return _FIRST_PORT + (job * _STEPS_OF_A_JOB + step) % _NUM_PORTS


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if name in environment), None)


def _value(environment: Mapping[str, str], *names: str) -> str:
    value = _first(environment, names)
    if value is None:
        raise ConfigurationError(f"srun has started this task, but {names[-1]} is not set; set it, or use torchrun")
    return value


def _integer(environment: Mapping[str, str], *names: str) -> int:
    value = _value(environment, *names)
    if not value.isdecimal():
        raise ConfigurationError(f"{names[-1]}='{value}' is not a whole number; use the one that srun sets")
    return int(value)
