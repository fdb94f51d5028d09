"""`booster run --elastic`: its options, and its run on one machine."""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import os
import platform
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import NoReturn

from booster.elastic.agent import Agent, LocalRanks, MachineMemory
from booster.elastic.rendezvous import SECRET_VARIABLE, Endpoint, Limits, Rendezvous
from booster.errors import ConfigurationError

_OURS = ("booster", "plugins", "shardformer")

_REJOIN_S = 30.0
_MAX_RESTARTS = 10
_SIGNAL_CODE = 128
_INTERRUPTED = 130
_NO_JOB = "none"  # torchrun's default of --rdzv-id
_NO_SECRET = (
    f"{SECRET_VARIABLE} is not set: whoever reaches the port of --rdzv-endpoint can command the job; set it to the "
    "same random text on all machines"
)
# Options of torchrun that an elastic job does not take, with the values that mean nothing.
_REFUSED: Mapping[str, tuple] = {
    "no_python": (False,),
    "log_dir": (None,),
    "redirects": ("0",),
    "tee": ("0",),
    "node_rank": (0,),
    "master_addr": ("127.0.0.1", None),
    "rdzv_backend": ("static", "c10d"),
    "numa_binding": (None,),
    "run_path": (False,),
}


class Interrupted(BaseException):
    """The user, or a scheduler, ends this agent."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of elastic jobs."""
    group = command.add_argument_group("elastic jobs")
    add = group.add_argument
    add("--elastic", action="store_true", help="go on with the ranks that are left when some, or machines, are lost")
    add("--min-ranks", type=int, metavar="A", help="ranks that the job needs (1)")
    add("--max-ranks", type=int, metavar="B", help="ranks that the job may have; the plugin's layout is for these")
    add("--rejoin-after", type=float, metavar="S", help=f"seconds until a dead rank is replaced ({_REJOIN_S:g})")
    add("--snapshot-dir", type=Path, metavar="DIR", help="where snapshots are kept (the memory of the machine)")
    add("--elastic-log", type=Path, metavar="FILE", help="append the times of losses and restarts, as JSON lines")


def is_elastic(options: argparse.Namespace) -> bool:
    """Return whether the job is elastic."""
    names = ("min_ranks", "max_ranks", "rejoin_after", "snapshot_dir", "elastic_log")
    given = [name for name in names if getattr(options, name) is not None]
    if given and not options.elastic:
        raise ConfigurationError(f"{_flag(given[0])} is an option of elastic jobs; add --elastic")
    return options.elastic


def run_elastic(options: argparse.Namespace, statuses: Path) -> int:
    """Run this machine's part of an elastic job.

    Args:
        statuses: folder for the wait statuses of ranks that have ended.

    Returns:
        The exit code.
    Raises:
        ConfigurationError: an option is invalid, or the machine does not belong to the job.
    """
    limits, num_places = limits_of(options), places_of(options)
    endpoints = [Endpoint.parse(each) for each in options.rdzv_endpoint.split(",") if each.strip()]
    secret = os.environ.get(SECRET_VARIABLE, "") if endpoints else secrets.token_hex()  # no other agent may join
    endpoints = endpoints or [Endpoint("127.0.0.1", _free_port())]
    if not secret and not all(map(Endpoint.is_of_one_machine, endpoints)):
        sys.stderr.write(f"note: {_NO_SECRET}\n")
    job_id = options.rdzv_id if options.rdzv_id != _NO_JOB else "elastic"
    argv = [options.training_script, *options.training_script_args]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each lost connection is a page of warnings
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    memory, ranks = MachineMemory(options.snapshot_dir), LocalRanks(argv, options.module, statuses)
    try:
        rendezvous = Rendezvous(endpoints, job_id, fingerprint_of(options), limits.join_s, secret)
        script = [] if options.module else imports_of(Path(options.training_script))
        ranks.import_modules([*script, *rendezvous.modules()])
        events = "" if options.elastic_log is None else str(options.elastic_log.resolve())
        rejoin_s = _REJOIN_S if options.rejoin_after is None else options.rejoin_after
        agent = Agent(rendezvous, ranks, memory, limits, num_places, rejoin_s=rejoin_s, job_id=job_id, events=events)
        return _run(agent)
    except Interrupted as interruption:
        return _end(ranks, interruption.number, options.shutdown_timeout)
    finally:
        ranks.close()
        memory.remove()


def _run(agent: Agent) -> int:
    """Run an agent; keep the state of a job that fails on disk. Return the exit code."""
    try:
        decision = agent.run()
        code, message = decision.code, decision.message
    except ConfigurationError as error:  # the rendezvous is lost for good
        code, message = 1, str(error)
    kept = agent.keep_state() if code else None
    if kept is not None:
        message = f"{message or 'the job has failed'}; the state of this machine is in {kept}, which a new start reads"
    if message:
        sys.stderr.write(f"error: {message}\n")
    return code


def limits_of(options: argparse.Namespace) -> Limits:
    """Return the numbers that the user may choose."""
    least, most = options.min_ranks if options.min_ranks is not None else 1, options.max_ranks
    if most is None:
        raise ConfigurationError("--elastic needs the number of ranks that the layout is for; add --max-ranks 4, say")
    if least < 1 or most < least:
        raise ConfigurationError(f"--min-ranks {least} --max-ranks {most} is no range; use 1 <= MIN <= MAX")
    for name, allowed in _REFUSED.items():
        if getattr(options, name, allowed[0]) not in allowed:
            raise ConfigurationError(f"{_flag(name)} has no effect with --elastic; leave it out")
    if options.rejoin_after is not None and not options.rejoin_after >= 0:
        raise ConfigurationError(f"--rejoin-after {options.rejoin_after:g} is no number of seconds; use 0 or more")
    if options.snapshot_dir is not None and not options.snapshot_dir.is_dir():
        raise ConfigurationError(f"--snapshot-dir {options.snapshot_dir} is no directory; give one of this machine")
    if options.nnodes not in ("1:1", "1") and not options.rdzv_endpoint:
        raise ConfigurationError("--nnodes with --elastic needs a place to meet; add --rdzv-endpoint HOST:29400")
    times = _times(options.rdzv_conf)
    restarts = {"max_restarts": options.max_restarts or _MAX_RESTARTS}
    return Limits(least, most, **times, **restarts)


def _times(text: str) -> dict[str, float]:
    """Read the waiting times from `--rdzv-conf`, which has torchrun's names for them."""
    names = {"join_timeout": "join_s", "last_call_timeout": "last_call_s", "keep_alive_timeout": "lost_s"}
    found = {}
    for pair in filter(None, (text or "").split(",")):
        key, _, value = pair.partition("=")
        if key.strip() not in names:
            raise ConfigurationError(f"--rdzv-conf {key} is not known with --elastic; use {', '.join(names)}")
        try:
            found[names[key.strip()]] = float(value)
        except ValueError:
            raise ConfigurationError(f"--rdzv-conf {pair} is no number of seconds; use {key}=30, say") from None
    return found


def places_of(options: argparse.Namespace) -> int:
    """Return the number of ranks of this machine."""
    if options.nproc_per_node is None:
        if options.rdzv_endpoint:
            raise ConfigurationError("--elastic with --rdzv-endpoint needs this machine's ranks; add --nproc-per-node")
        return options.max_ranks
    if options.nproc_per_node.isdecimal():
        return int(options.nproc_per_node)
    from torch.distributed.run import determine_local_world_size

    return determine_local_world_size(options.nproc_per_node)


def fingerprint_of(options: argparse.Namespace) -> dict[str, str]:
    """Return what the machines of a job must have in common."""
    script = Path(options.training_script)
    text = script.read_bytes() if script.is_file() and not options.module else b""
    return {
        "command": " ".join([script.name, *options.training_script_args]),
        "content of the script": hashlib.sha256(text).hexdigest()[:12],
        "range of ranks": f"{options.min_ranks}:{options.max_ranks}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in ("hybrid-booster", "torch", "transformers")},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _on_signal(number: int, frame: FrameType | None) -> NoReturn:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def _end(ranks: LocalRanks, number: int, timeout_s: float) -> int:
    """End the ranks as the user wants; return the exit code."""
    ranks.signal(signal.SIGTERM)
    until = time.monotonic() + timeout_s
    while ranks.running and time.monotonic() < until:
        time.sleep(0.05)
        ranks.poll()
    if number == signal.SIGINT:
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED
    return _SIGNAL_CODE + number


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ----- which installed packages a script imports, found without running it -----


def imports_of(script: Path) -> list[str]:
    """Return what a script imports from installed packages and from this one, as `module` or `module:name`.

    Modules next to the script are left out: importing them may do what is meant for each rank.
    """
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []  # running it will say what is wrong
    return [name for name in _imports(tree) if _is_installed(name.partition(":")[0].partition(".")[0])]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{each.name}" for each in node.names if each.name != "*")


def _is_installed(package: str) -> bool:
    if package in _OURS:
        return True
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and "site-packages" in (found.origin or "")
