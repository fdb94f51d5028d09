"""`booster run`: torchrun and its options, with less output.

It runs torchrun (elastic agent, rendezvous, restarts), with three differences: the arguments are checked before
anything starts, the agent prints no report in addition to a failing rank's own, and Ctrl-C ends all ranks in seconds.

When a job fails, torchrun's agent says so in the rendezvous. On a machine that is cut off, that waits for minutes, so
that the agent is ended here (`end_after_report`).

torchrun starts the store on the machine whose name stands for the address of `--rdzv-endpoint`, and tells the ranks the
name of the first machine. With Debian's `127.0.1.1 node1` in /etc/hosts no machine starts the store, and with a name
that only its own machine knows, no other machine finds rank 0. So both are read from the network instead
(`complete_rendezvous`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from booster.cli.command_parser import HelpFormatter, epilog
from booster.elastic.command import add_options, is_elastic, run_elastic
from booster.errors import ConfigurationError
from booster.extensions import hidden_beside
from booster.failure.diagnosis import REPORT_VARIABLE
from booster.failure.peers import STATUS_VARIABLE, note_children
from booster.launch import PROFILE_FOLDER, PROFILE_STEPS
from booster.network import address_towards, addresses_of, first_address, is_held, is_loopback
from booster.plugin import plugin_class
from booster.profiling import JobProfile
from booster.takeover import VARIABLE as LAYOUT_VARIABLE

_BACKEND = "c10d"
_DEFAULT_PORT = 29400


def complete_rendezvous(options: argparse.Namespace) -> None:
    """Set the store's machine and this one's address, where torchrun would not find out, in its `options`."""
    host, _, port = options.rdzv_endpoint.rpartition(":")
    host, port = (host, port) if host and port.isdecimal() else (options.rdzv_endpoint, str(_DEFAULT_PORT))
    host = host.strip("[]")
    addresses = addresses_of(host) if host else []
    own_name = socket.gethostname()
    if options.rdzv_backend != _BACKEND or not addresses or (host != own_name and is_loopback(addresses[0])):
        return  # another rendezvous, or agents of one machine
    held = next((address for address in addresses if is_held(address)), None)
    if "is_host" not in options.rdzv_conf and not _is_recognised(host, addresses, held is not None):
        # Of two agents of one machine, the second finds the port taken.
        has_store = held is not None and _is_free(held, int(port))
        options.rdzv_conf = ",".join(part for part in (options.rdzv_conf, f"is_host={has_store}") if part)
    if options.local_addr is None:
        own = held or address_towards(host)
        options.local_addr = first_address() if own is None or is_loopback(own) else own


def _is_recognised(host: str, addresses: list[str], is_here: bool) -> bool:
    """Return whether torchrun knows if the endpoint is this machine's: it looks up the machine's own name."""
    own = addresses_of(socket.gethostname())
    return host == socket.gethostname() or bool(own and (not is_here or set(own) & set(addresses)))


def _is_free(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return True
    return False


_POLL_S = 1.0
# Longer than ranks take to end: they get SIGTERM first, and SIGKILL 5 s later.
_PATIENCE_S = 15.0


def end_after_report(report: Path) -> None:
    """End this process some seconds after a rank has written the job's failure to `report`, unless it ends itself."""
    threading.Thread(target=_watch, args=(report,), name="booster-agent-watch", daemon=True).start()


def _watch(report: Path) -> None:
    while not report.exists():
        time.sleep(_POLL_S)
    time.sleep(_PATIENCE_S)
    os._exit(1)


_PROG = "booster run"
_EXAMPLE = "`booster run --nproc-per-node 4 script.py`"
EXAMPLES = (
    "booster run --nproc-per-node 4 script.py --epochs 3",
    "booster run --nproc-per-node 4 --layout tp=2,pp=2 script.py",
    "booster run --nproc-per-node 4 --profile 3 script.py",
    "booster run --nproc-per-node 2 -m booster doctor --tp 2",
    "booster run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 script.py",
    "booster run --nnodes 1:4 --nproc-per-node 8 --max-restarts 3 --rdzv-endpoint HOST:29400 script.py",
    "booster run --elastic --min-ranks 2 --max-ranks 4 script.py",
)
_PROFILE_FOLDER = "profile"
_START = Path(__file__).resolve().parents[2] / "hybrid_booster" / "site"  # imported when a rank's interpreter starts
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_QUIET_PROFILER = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it logs its start, and what it cannot see
_ONE_MACHINE = ("1", "1:1")
_INTERRUPTED = 130
_SIGNAL_CODE = 128
# Seconds after which a rank that ignores the shutdown signal is killed; torchrun's default is 30.
_SHUTDOWN_S = 5
_SHUTDOWN_VARIABLES = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
_TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_OWN_SIGNALS = "SIGTERM,SIGHUP,SIGQUIT"
_NPROC_VARIABLE = "PET_NPROC_PER_NODE"
# Options that stand before a script elsewhere, as the parser's message names them -> what to use.
_INSTEAD = {
    re.compile(rf"(?<!\S)({names})(?=[\s=]|$)"): instead
    for names, instead in {
        r"--?np?|--nprocs?|--num[-_](?:processes|gpus)|--n?gpus|--world[-_]size": f"--nproc-per-node, as in {_EXAMPLE}",
        r"--(?:tp|pp|cp|sp|ep|dp|zero)(?:[-_](?:size|stage))?": (
            "--layout, as in `booster run --nproc-per-node 4 --layout tp=2,pp=2 script.py`, or the plugin in the script"
        ),
    }.items()
}
_BEFORE_SCRIPT = ("nproc-per-node", "nnodes", "layout", "elastic", "min-ranks", "max-ranks", "rdzv-endpoint")
_NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for them.

    Returns:
        The exit code of the first rank that failed, else 0; 130 after Ctrl-C.
    Raises:
        ConfigurationError: an option is unknown, a value is invalid, or the script is missing.
    """
    options = options_of(arguments)
    elastic = is_elastic(options)
    if not elastic:
        options.nproc_per_node = options.nproc_per_node or "1"
    _check(options)
    _take_over(options)
    if not (options.module or options.no_python):
        notes = (hidden_beside(Path(options.training_script).resolve()), _misplaced(options))
        sys.stderr.writelines(f"note: {each}\n" for each in notes if each is not None)
    if not elastic:
        _prepare(options)
    _choose_allocator()
    profile = _profile(options)
    with tempfile.TemporaryDirectory(prefix="booster-run-") as folder:
        report = Path(folder, "report")
        os.environ |= {REPORT_VARIABLE: str(report), STATUS_VARIABLE: folder}
        if elastic:
            code = run_elastic(options, Path(folder))
        else:
            note_children(Path(folder))
            if options.max_restarts == 0 and options.nnodes not in _ONE_MACHINE:
                end_after_report(report)
            code = _run(options, report.exists)
    if profile is not None:
        sys.stderr.write(f"note: {profile.finish()}\n")
    if code:
        _leave_now(code)
    return code


def _leave_now(code: int) -> NoReturn:
    """Exit at once: all ranks have ended, and shutting down an interpreter with torch can take seconds."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line, of which all behind the script's name is the script's.

    Before 3.12 argparse takes a `--n` there for the start of `--nnodes`, and refuses it.
    """
    command, place = parser(), 0
    takes_value = {name: each.nargs is None for each in command._actions for name in each.option_strings}
    while place < len(arguments) and arguments[place].startswith("-"):
        word = arguments[place]
        place += 1 + next((takes for name, takes in takes_value.items() if name.startswith(word) and word != "--"), 0)
    options = command.parse_args(arguments[: place + 1])
    options.training_script_args = arguments[place + 1 :]
    return options


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: torchrun's, with options of ours."""
    from torch.distributed.run import get_args_parser

    command = get_args_parser()
    command.prog = _PROG
    command.formatter_class = HelpFormatter
    command.description = (
        "Start a script on several ranks. All options of torchrun are understood. "
        "Ctrl-C ends the ranks with SIGTERM, and after a few seconds with SIGKILL."
    )
    command.epilog = epilog(EXAMPLES)
    command.error = _refuse
    if not any(name in os.environ for name in _SHUTDOWN_VARIABLES):
        command.set_defaults(shutdown_timeout=_SHUTDOWN_S)
    if _NPROC_VARIABLE not in os.environ:
        command.set_defaults(nproc_per_node=None)  # 1, or as many as an elastic job may have
    command.add_argument("--profile", metavar="N", help="write a trace of N steps, with memory, of all ranks")
    command.add_argument("--profile-output", type=Path, metavar="DIR", help=f"where (./{_PROFILE_FOLDER})")
    command.add_argument("--layout", metavar="LAYOUT", help="boost an unmodified script: tp=2,pp=2, FILE.json or auto")
    command.add_argument("--memory", metavar="SIZE", help="of a device, for --layout auto, such as 24GiB")
    add_options(command)
    return command


def _refuse(message: str) -> NoReturn:
    """Replace the parser's `error` method, which prints the whole usage."""
    if "training_script" in message:
        raise ConfigurationError(f"no script was given; use {_EXAMPLE}")
    for names, instead in _INSTEAD.items():
        if (name := names.search(message)) is not None:
            raise ConfigurationError(f"{_PROG} has no option '{name[0]}'; use {instead}")
    raise ConfigurationError(f"{message}; `{_PROG} --help` lists what there is")


def _check(options: argparse.Namespace) -> None:
    if options.nproc_per_node is not None:
        _check_nproc(options.nproc_per_node)
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", options.nnodes):
        raise ConfigurationError(f"--nnodes={options.nnodes} is not a number of machines; use N or MIN:MAX, as in 1:4")
    script = options.training_script
    is_file = not (options.module or options.no_python)
    if is_file and not Path(script).is_file():
        raise ConfigurationError(f"script '{script}' is not a file; use one that exists, as in {_EXAMPLE}")
    if options.module and options.no_python:
        raise ConfigurationError("--module and --no-python exclude one another; use one of them")


def _misplaced(options: argparse.Namespace) -> str | None:
    """Return a note on an option of ours behind the name of a script that does not take it; None without one."""
    source = Path(options.training_script).read_text(encoding="utf-8", errors="replace")
    for word in options.training_script_args:
        name = word.removeprefix("--").partition("=")[0].replace("_", "-")
        as_field = name.replace("-", "[-_]")
        taken = rf"""["']--{as_field}\b|(?<![-\w]){name.replace("-", "_")}\s*[:=]"""
        if word.startswith("--") and name in _BEFORE_SCRIPT and not re.search(taken, source):
            return (
                f"--{name} stands behind the script's name, so that the script gets it and {_PROG} does not; write "
                f"`{_PROG} --{name} … {options.training_script}`"
            )
    return None


def _profile(options: argparse.Namespace) -> JobProfile | None:
    """Ask the ranks for a profile, through their environment; None if the user wants none."""
    if options.profile is None:
        if options.profile_output is not None:
            raise ConfigurationError("--profile-output is where a profile is written; add --profile 3, say")
        return None
    if not options.profile.isdecimal() or int(options.profile) < 1:
        raise ConfigurationError(f"--profile={options.profile} is not a number of steps; use 1 or more")
    alone = options.nnodes in _ONE_MACHINE
    profile = JobProfile(int(options.profile), options.profile_output or Path(_PROFILE_FOLDER), alone)
    os.environ |= {PROFILE_STEPS: str(profile.num_steps), PROFILE_FOLDER: str(profile.scratch)}
    os.environ |= {name: os.environ.get(name, level) for name, level in _QUIET_PROFILER.items()}
    return profile


def _take_over(options: argparse.Namespace) -> None:
    """Have ranks boost the script by a given layout; raises ConfigurationError if it is invalid or fits no ranks."""
    layout, inherited = options.layout, os.environ.get(LAYOUT_VARIABLE)
    if options.memory is not None:
        if layout != "auto":
            raise ConfigurationError(f"--memory {options.memory} is for the planner; add --layout auto")
        layout = f"auto,memory={options.memory}"
    if layout is None and inherited is None:
        return
    if None not in (layout, inherited) and layout != inherited:
        raise ConfigurationError(
            f"--layout {layout} and {LAYOUT_VARIABLE}={inherited} are two layouts; use one of them"
        )
    layout = inherited if layout is None else layout
    if Path(layout).is_file():
        layout = str(Path(layout).resolve())
    ranks = options.max_ranks if options.elastic else _number_of_ranks(options)
    if ranks is not None:
        plugin_class().check_config(layout, ranks)
    os.environ[LAYOUT_VARIABLE] = layout
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_START), *filter(None, [os.environ.get("PYTHONPATH")])])


def _number_of_ranks(options: argparse.Namespace) -> int | None:
    """Return the number of ranks of the job; None if it is known later."""
    given = (options.nproc_per_node, options.nnodes.removeprefix("1:"))
    return math.prod(map(int, given)) if all(map(str.isdecimal, given)) else None


def _check_nproc(value: str) -> None:
    if value in _NPROC_WORDS or (value.isdecimal() and int(value) >= 1):
        return
    raise ConfigurationError(
        f"--nproc-per-node={value} is not a number of ranks; use 1 or more, or one of {', '.join(_NPROC_WORDS)}"
    )


def _prepare(options: argparse.Namespace) -> None:
    """Set variables that torchrun would warn about, and silence its report on ranks that have reported themselves."""
    if options.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    least, _, most = options.nnodes.partition(":")
    if most not in ("", least):  # torchrun's default is 1:1
        # With one store for all rounds, agents that join later wait for its address, which is told in the first alone.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    complete_rendezvous(options)
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    if options.signals_to_handle == _TORCHRUN_SIGNALS:
        # torchrun would forward SIGINT, and each rank would print a traceback of its current position.
        options.signals_to_handle = _OWN_SIGNALS
        signal.signal(signal.SIGINT, _on_interrupt)


def _choose_allocator() -> None:
    """Let the memory of GPUs grow in place, unless the user has chosen: rows of many lengths leave no gaps in it."""
    import torch

    if torch.cuda.device_count() and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _on_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Make the agent shut its ranks down as on SIGTERM; a second Ctrl-C must not interrupt that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise _interruption()


def _interruption() -> Exception:
    from torch.distributed.elastic.multiprocessing import SignalException

    error = SignalException("interrupted", sigval=signal.SIGTERM)
    error.by_user = True
    return error


def _run(options: argparse.Namespace, was_reported: Callable[[], bool]) -> int:
    """Run torchrun; return the job's exit code. `was_reported`: whether a rank has said why it failed."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
    from torch.distributed.run import run

    try:
        run(options)
    except ChildFailedError as error:
        return _code_of(error.failures, was_reported())
    except SignalException as error:
        return _ended(error)
    except RendezvousConnectionError:
        raise ConfigurationError(
            f"the rendezvous at {options.rdzv_endpoint} does not answer; look whether its machine runs and is reached"
        ) from None
    except (ValueError, AssertionError, RendezvousError, DistError) as error:  # how torchrun rejects an option
        _refuse(" ".join(str(error).split()))
    return 0


def _code_of(failures: dict[int, Any], was_reported: bool) -> int:
    """Return the code of the rank at fault, ended by a signal but SIGTERM or first; print it if unreported."""
    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    for rank, failure in by_time:
        number = -failure.exitcode
        if number > 0 and number != signal.SIGTERM:
            if not was_reported:  # a killed rank cannot report itself
                why = "; if no one sent it, the system ran out of memory" if number == signal.SIGKILL else ""
                sys.stderr.write(f"error: rank {rank} was ended by {signal.Signals(number).name}{why}\n")
            return _SIGNAL_CODE + number
    rank, code = next(((rank, each.exitcode) for rank, each in by_time if each.exitcode > 0), (0, 0))
    if code and not was_reported:  # by sys.exit: Python prints nothing, and the other ranks were shut down too soon
        sys.stderr.write(f"error: rank {rank} ended with exit code {code}, which ended the job\n")
    return code or _SIGNAL_CODE + signal.SIGTERM


def _ended(error: Any) -> int:
    if getattr(error, "by_user", False):
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED
    return _SIGNAL_CODE + int(error.sigval)
