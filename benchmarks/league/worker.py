"""The ranks of a league: `python -m benchmarks.league.worker MODULE…`, with a socket as its standard input.

A rank says `[pid]`, reads tasks as lines of JSON, `[system, family, class, tp_size, pp_size]`, and answers each with
the fields of an `Outcome`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from benchmarks.league import outcome
from benchmarks.league.controls import plain_seconds
from benchmarks.league.outcome import Outcome, RefusedError, shortened
from benchmarks.league.system import Trained
from benchmarks.league.systems import SYSTEMS
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.verify.compare import Tolerance, compare
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from plugins.hybrid_parallel.verify.train import Trace, VerifyCase, train_reference
from shardformer.distributed.process_groups import broadcast_json

_ROWS, _STEPS = 6, 2
_MOST_RANKS = 64
_MODELLING = os.path.join("transformers", "models", "")
_TOLERANCE = Tolerance(loss=1e-3, tensor=1e-3, floor=1e-4)  # of the census


def judge(system: str, family: str, name: str, tp_size: int, pp_size: int) -> Outcome:
    """Train a class plainly and by a system, and compare; the same on all ranks."""
    if reason := SYSTEMS[system].why_not(tp_size, pp_size):
        return Outcome(outcome.REFUSED, shortened(reason))
    found = _reference(family, name)
    if isinstance(found, Outcome):
        return found
    case, plain, seconds = found
    try:
        trained = SYSTEMS[system].train(case, tp_size, pp_size)
    except (RefusedError, ConfigurationError, NotImplementedError) as error:
        return Outcome(outcome.REFUSED, shortened(error))
    except Exception as error:
        traceback.print_exc()
        inner = _innermost(error)
        return Outcome(outcome.CRASHED, shortened(f"{type(error).__name__}: {inner}"), place=place_of(inner))
    if broadcast_json(_agrees(plain, trained)):
        return Outcome(outcome.EXACT if trained.is_cut else outcome.UNCUT, "", trained.seconds, seconds)
    place = _first_place(system, case, plain, trained, (tp_size, pp_size))
    return Outcome(outcome.WRONG, shortened(place), trained.seconds)


@lru_cache(maxsize=1)
def _reference(family: str, name: str) -> tuple[VerifyCase, Trace, float] | Outcome:
    """Return a class's tiny model, its plain training, and the seconds of a plain step; or why it does not train.

    All ranks train plainly: losses of detectors add up their boxes over ranks where accelerate has been in the process.
    """
    module = f"transformers.models.{family}.modeling_{family}"
    case = plain = None
    found: tuple[str, float] = ("", 0.0)
    try:
        config_class = getattr(importlib.import_module(module), name).config_class
        config = small_config(config_class(), TwinSizes(kv_heads=4, is_faithful=False))
        case = VerifyCase(TinyModel(module, name, config, torch.float32, most_parameters=None), _ROWS, _STEPS, {})
        plain = train_reference(case)
        found = ("", plain_seconds(case))
    except Exception as error:  # any of a thousand classes may fail in its own way
        found = (shortened(error), 0.0)
    why, seconds = broadcast_json(found)
    return Outcome(outcome.NOT_PLAIN, why) if why or case is None else (case, plain, seconds)


def _agrees(plain: Trace, trained: Trained) -> bool:
    losses, gradients, _ = compare(plain, trained.traces, _TOLERANCE).worst
    return losses.value < _TOLERANCE.loss and gradients.value < _TOLERANCE.tensor


def _first_place(system: str, case: VerifyCase, plain: Trace, trained: Trained, sizes: tuple[int, int]) -> str:
    """Train once more with the outputs of modules, and tell the first that differs; the parameter, where they agree."""
    try:
        again = SYSTEMS[system].train(case, *sizes, is_logged=True) if SYSTEMS[system].is_explained else trained
    except Exception:  # hooks may disturb a library
        again = trained
    first = compare(plain, again.traces, _TOLERANCE).first or compare(plain, trained.traces, _TOLERANCE).first
    text = "nothing that the first rank recorded" if first is None else first.text
    kept = text.partition("; outputs of modules")[0].partition(": the forward pass agrees")[0]
    return broadcast_json(kept.partition(": outputs of modules could not")[0])


def _innermost(error: BaseException) -> BaseException:
    """The error that caused this one: torch's pipelines wrap it in what a stage got."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def place_of(error: BaseException) -> str:
    """Return the innermost function of transformers' modelling code that an error left; empty if there is none."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((code.co_qualname for code in reversed(codes) if _MODELLING in code.co_filename), "")


def serve(rank: int, world_size: int, store: str, line: socket.socket) -> None:
    """Be one rank: say which process this is, and answer tasks until the line ends."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world_size)
    line.sendall(json.dumps([os.getpid()]).encode() + b"\n")
    for task in line.makefile("r"):
        found = judge(*json.loads(task))
        line.sendall(json.dumps(astuple(found)).encode() + b"\n")


def main(imports: list[str]) -> None:
    """Import what systems need, and fork ranks whenever a line with the path of their store and a socket each comes."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in imports:
        with contextlib.suppress(Exception):  # the system says so itself
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for ranks that ended
    control = socket.socket(fileno=os.dup(0))
    while True:
        path, descriptors, _, _ = socket.recv_fds(control, 4096, _MOST_RANKS)
        if not path:
            return
        for rank, descriptor in enumerate(descriptors):
            if os.fork() == 0:
                for other in descriptors:
                    if other != descriptor:
                        os.close(other)
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(rank, len(descriptors), path.decode().strip(), socket.socket(fileno=descriptor))
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
