"""Joining the job, by torchrun or SLURM: process group, device, seeds and failure monitor.

This is the only module that reads a job's environment variables.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from booster import failure
from booster.elastic.job_environment import VARIABLE as ELASTIC
from booster.elastic.job_environment import ElasticPlace, agree_on_round
from booster.errors import ConfigurationError, checks_arguments
from booster.logging import get_logger
from booster.network import address_towards, interface_of, is_loopback, name_is_usable
from shardformer.distributed.collectives import world_timeout

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
    num_tasks = _slurm_integer(environment, *_NUM_TASKS)
    if num_tasks < 2:
        return {}
    variables = {
        "RANK": str(_slurm_integer(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(_slurm_integer(environment, "SLURM_LOCALID")),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(_value(environment, *_NODES)),
        "MASTER_PORT": environment.get("MASTER_PORT")
        or str(_FIRST_PORT + (_slurm_integer(environment, "SLURM_JOB_ID") * _STEPS_OF_A_JOB + int(step)) % _NUM_PORTS),
    }
    if "SLURM_NODEID" in environment:
        node = _slurm_integer(environment, "SLURM_NODEID")
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


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if name in environment), None)


def _value(environment: Mapping[str, str], *names: str) -> str:
    value = _first(environment, names)
    if value is None:
        raise ConfigurationError(f"srun has started this task, but {names[-1]} is not set; set it, or use torchrun")
    return value


def _slurm_integer(environment: Mapping[str, str], *names: str) -> int:
    value = _value(environment, *names)
    if not value.isdecimal():
        raise ConfigurationError(f"{names[-1]}='{value}' is not a whole number; use the one that srun sets")
    return int(value)


_logger = get_logger(__name__)
_MARKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MACHINE_NUMBERS = ("GROUP_RANK", "NODE_RANK")  # torchrun's, and Ray's
_RUN_ID = "TORCHELASTIC_RUN_ID"  # set by torchrun
_START = Path(__file__).resolve().parents[1] / "hybrid_booster" / "site"
_LAYOUT, _TAKEOVER = "BOOSTER_LAYOUT", "booster.takeover"  # which reads it, if it was started
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
PROFILE_STEPS, PROFILE_FOLDER = "BOOSTER_PROFILE_STEPS", "BOOSTER_PROFILE_FOLDER"  # set by `booster run --profile`
_GPU_BACKEND = "cpu:gloo,cuda:nccl"
_TIMEOUT_S = 1800.0
_HEARTBEAT_S = 60.0
_HOW_TO_START = "start the script with `booster run --nproc-per-node N` or torchrun"


@dataclass(frozen=True)
class RankInfo:
    """Position of this process in the job."""

    rank: int
    world_size: int
    local_rank: int


@checks_arguments
def launch_from_torch(
    seed: int | None = 42,
    backend: str | None = None,
    timeout_s: float = _TIMEOUT_S,
    heartbeat_s: float = _HEARTBEAT_S,
) -> None:
    """Join the job that torchrun, `booster run` or `srun` started; without any of them, start a job of one process.

    If a process group exists already, as after an earlier call or in Ray's workers, it is used as it is, and left so at
    the end. One that another library has made from torchrun's variables, as `TrainingArguments` does, is watched for
    failures from then on. A task of `srun` gets torchrun's variables in its environment, where other libraries find
    them.

    Args:
        seed: seed of `random`, numpy and torch, the same on all ranks; None leaves the generators unchanged.
        backend: process group backend; by default NCCL for GPU tensors (if there are GPUs) and gloo for CPU tensors.
        timeout_s: seconds after which a collective without its peers, or a rank that has not joined, is an error.
        heartbeat_s: seconds without a heartbeat from any rank of another machine after which that machine counts as
            lost; 0 for never. Ranks on the same machine are monitored as processes.

    Raises:
        ConfigurationError: the environment variables of torchrun or SLURM are incomplete or invalid, or one gives a
            layout that nothing reads.
    """
    failure.report_uncaught()
    if _LAYOUT in os.environ and _TAKEOVER not in sys.modules:
        raise ConfigurationError(
            f"{_LAYOUT}={os.environ[_LAYOUT]} has no effect: this Python has read no hybrid_booster.pth, which an "
            f"installed package has; use `booster run --layout`, or put {_START} on PYTHONPATH"
        )
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            os.environ.update(variables_of_task(os.environ))
        _join(place_from_environment(os.environ), "env://", backend, timeout_s, heartbeat_s)
    elif _RUN_ID in os.environ:
        _watch_existing_group(heartbeat_s)
    _seed_all(seed)


def launch(
    rank: int,
    world_size: int,
    host: str = "localhost",
    port: int = 29500,
    *,
    local_rank: int | None = None,
    seed: int | None = 42,
    backend: str | None = None,
    timeout_s: float = _TIMEOUT_S,
    heartbeat_s: float = _HEARTBEAT_S,
) -> None:
    """Join a job whose ranks were started by other means; all pass the host and port of rank 0.

    Args:
        rank: rank of this process in the job.
        world_size: number of ranks of the job.
        host: host name or address of rank 0.
        port: port of rank 0.
        local_rank: rank within this machine, which selects the GPU (default: `rank` modulo the number of GPUs).
        seed: see `launch_from_torch`, as for `backend`, `timeout_s` and `heartbeat_s`.

    Raises:
        ConfigurationError: `rank` is not in [0, world_size), or its GPU does not exist.
    """
    failure.report_uncaught()
    if not dist.is_initialized():
        place = _checked(RankInfo(rank, world_size, _default_local_rank(rank) if local_rank is None else local_rank))
        _join(place, f"tcp://{host}:{port}", backend, timeout_s, heartbeat_s)
    _seed_all(seed)


def debug_is_asked() -> bool:
    """Return whether `BOOSTER_DEBUG=1` is set, which turns on debug mode without a change of the script."""
    return os.environ.get("BOOSTER_DEBUG", "0") not in ("", "0")


def elastic_place() -> ElasticPlace | None:
    """Return the place of this rank in an elastic job; None if the job is not elastic."""
    text = os.environ.get(ELASTIC)
    return None if text is None else ElasticPlace.from_json(text)


def job_store() -> dist.Store:
    """Return the store of the default process group; its keys are those of this round of the job alone."""
    return dist.distributed_c10d._get_default_store()


def take_profile_request() -> tuple[int, Path] | None:
    """Return how many steps `booster run --profile` wants to see, and the folder for them; once in a process."""
    steps = os.environ.pop(PROFILE_STEPS, None)
    return None if steps is None else (int(steps), Path(os.environ[PROFILE_FOLDER]))


def machine_of_this_rank() -> str:
    """Return this rank's machine: the host, and its number if the launcher (torchrun's agents) counts them."""
    number = next((os.environ[name] for name in _MACHINE_NUMBERS if name in os.environ), None)
    return socket.gethostname() + ("" if number is None else f" (machine {number})")


def place_from_environment(environment: Mapping[str, str]) -> RankInfo:
    """Read the position from torchrun's variables, all or none (a job of one process); refuses invalid ones."""
    if not any(name in environment for name in _MARKS):
        return RankInfo(rank=0, world_size=1, local_rank=0)
    missing = [name for name in _REQUIRED if name not in environment]
    if missing:
        given = [name for name in (*_MARKS, *_REQUIRED[2:]) if name in environment]
        verb = "is" if len(given) == 1 else "are"
        raise ConfigurationError(f"{_listed(given)} {verb} set but not {_listed(missing)}; set all, or {_HOW_TO_START}")
    rank = _integer(environment, "RANK")
    local_rank = _integer(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else _default_local_rank(rank)
    return _checked(RankInfo(rank, _integer(environment, "WORLD_SIZE"), local_rank))


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigurationError(f"{name}='{environment[name]}' is not a whole number; {_HOW_TO_START}") from None


def _default_local_rank(rank: int) -> int:
    return rank % max(1, torch.cuda.device_count())


def _checked(place: RankInfo) -> RankInfo:
    if place.world_size < 1:
        raise ConfigurationError(f"world_size={place.world_size} is below 1; use the number of ranks of the job")
    if not 0 <= place.rank < place.world_size:
        raise ConfigurationError(
            f"rank={place.rank} is not one of the world_size={place.world_size} ranks; use 0 to {place.world_size - 1}"
        )
    return place


def _join(place: RankInfo, rendezvous_url: str, backend: str | None, timeout_s: float, heartbeat_s: float) -> None:
    backend = backend or (_GPU_BACKEND if torch.cuda.is_available() else "gloo")
    if "nccl" in backend:
        _choose_gpu(place.local_rank)
    timeout = timedelta(seconds=timeout_s)
    store = _store(place, rendezvous_url, timeout)
    if debug_is_asked():
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # all groups, this first one too, compare collectives
    name = _round(store, place, timeout_s)
    if place.world_size > 1:
        # Before the process group, so that a rank that fails while joining is noticed.
        _watch(store, name, place, timeout_s, heartbeat_s)
    if "gloo" in backend:
        _choose_interface(dist.PrefixStore(f"addresses/{name}", store), getattr(store, "host", None), place)
    with failure.staying_outermost():
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"default_pg/{name}", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
    failure.destroy_at_exit(dist.group.WORLD)
    _logger.info("joined %d rank(s) with backend %s", place.world_size, backend)


def _watch_existing_group(heartbeat_s: float) -> None:
    """Start the failure monitor for a process group that was made elsewhere, unless it runs already."""
    if failure.is_watching() or dist.get_world_size() == 1:
        return
    store = job_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # MPI's groups have none
        return
    place = RankInfo(dist.get_rank(), dist.get_world_size(), local_rank=0)
    timeout_s = (world_timeout() or timedelta(seconds=_TIMEOUT_S)).total_seconds()
    _watch(store, _round(store, place, timeout_s), place, timeout_s, heartbeat_s)


def _watch(store: dist.Store, name: str, place: RankInfo, timeout_s: float, heartbeat_s: float) -> None:
    """Start the failure monitor on its own store connection, so that a blocked main thread does not hold it up."""
    failure.install(
        dist.PrefixStore(f"booster/{name}", store.clone()),
        place.rank,
        place.world_size,
        store_name=f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else "",
        holds_store=place.rank == 0 and not _uses_the_agents_store(),
        heartbeat_s=heartbeat_s,
        timeout_s=timeout_s,
        server=store,
    )


def _round(store: dist.Store, place: RankInfo, timeout_s: float) -> str:
    """Return what keeps the keys of this round apart from those of others in the same store."""
    if place.world_size == 1 or not _uses_the_agents_store():
        return ""  # the store is new
    job = dist.PrefixStore(f"booster/rounds/{os.environ.get(_RUN_ID, '')}", store)
    return agree_on_round(job, place.rank, place.world_size, timeout_s)


def _uses_the_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(place: RankInfo, rendezvous_url: str, timeout: timedelta) -> dist.Store:
    if place.world_size == 1 and rendezvous_url == "env://":
        return dist.HashStore()  # a single process needs no rendezvous port
    store, _, _ = next(dist.rendezvous(rendezvous_url, place.rank, place.world_size, timeout=timeout))
    return store


def _choose_interface(store: dist.Store, store_host: str | None, place: RankInfo) -> None:
    """Let gloo listen where the other machines find this one, if that is not where the host's name says.

    Of several addresses, that towards the store is taken; on the store's own machine, that towards another machine.

    Args:
        store: a store for this alone.
        store_host: the host of the job's store; None if it has none.
        place: of this rank.
    """
    if store_host is None or place.world_size == _ranks_of_this_machine():
        return
    own = address_towards(store_host) or ""
    store.set(str(place.rank), own)
    if _GLOO_INTERFACE in os.environ or name_is_usable():
        return
    if not own or is_loopback(own):
        others = [value.decode() for value in store.multi_get([str(rank) for rank in range(place.world_size)])]
        far = next((each for each in others if each and not is_loopback(each)), None)
        own = address_towards(far) if far is not None else None  # otherwise the agents are on one host
    interface = None if own is None else interface_of(own)
    if interface is not None:
        os.environ[_GLOO_INTERFACE] = interface


def _ranks_of_this_machine() -> int | None:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() else None


def _choose_gpu(local_rank: int) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ConfigurationError("backend='nccl' needs a GPU for each rank, and torch finds none; use backend='gloo'")
    if num_gpus == 1 and any(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")):
        local_rank = 0  # each process sees only its own; `boost` refuses two ranks on one
    if not 0 <= local_rank < num_gpus:
        raise ConfigurationError(
            f"local_rank={local_rank} has no GPU: this machine has {num_gpus} and each rank needs its own; "
            f"use --nproc-per-node {num_gpus}"
        )
    torch.cuda.set_device(local_rank)


def _seed_all(seed: int | None) -> None:
    if seed is None:
        return
    if not isinstance(seed, Integral):
        raise ConfigurationError(f"seed={seed!r} is not an integer; use seed=42")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def command_of_this_job(*more: str) -> str:
    """Return the command that starts this script again; one of `more` replaces an option that it was given."""
    names = {option for option in more if option.startswith("--")}
    kept, skips = [], False
    for word in sys.argv:
        if word.startswith("--"):
            skips = word.partition("=")[0] in names
        if not skips:
            kept.append(word)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = dist.get_world_size() if dist.is_initialized() else here
    machines = [] if world_size == here else ["--nnodes", str(world_size // here)]
    return shlex.join(["booster", "run", *machines, "--nproc-per-node", str(here), *kept, *more])
