"""SIGTERM for all ranks is no failure, however late it reaches some of them; for one rank alone it is one.

So are errors that the script catches on all ranks, signals that it handles, and operations of other threads. What
breaks here first: a rank takes the end of another, which got the signal first, for a failure. Look at `_told` in
`booster/failure/monitor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from booster import Booster, failure
from booster.errors import ConfigurationError, NonFiniteError, SynchronyError, VerificationError
from booster.failure import hooks
from booster.launch import launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ended_ranks import run_to_the_end

_TERMINATED = 128 + signal.SIGTERM
_LATER_S = 0.8  # enough for a rank to notice that another has ended
_STOPPED_S = 2.5  # rank 1 asks the store, which the stopped rank holds, for 2 s before it ends
_LIMIT_S = 10.0


def _end_rank_1(then: str) -> None:
    """Rank 0, which holds the store, ends rank 1.

    Args:
        then: "nothing"; "later": rank 0 gets the signal after it has seen the end of rank 1; "stopped": it gets both
            news at the same time, because it was stopped before.
    """
    launch_from_torch()
    pids = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor(os.getpid()))
    if dist.get_rank() == 0 and then == "stopped":
        _signal_both_while_stopped(int(pids[1]))
    elif dist.get_rank() == 0:
        os.kill(int(pids[1]), signal.SIGTERM)
        if then == "later":
            time.sleep(_LATER_S)
            os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2 * _LIMIT_S)


def _signal_both_while_stopped(other: int) -> None:
    """Let a new process stop this one, send the signals, and resume this one when the other has ended."""
    own = os.getpid()
    if os.fork() == 0:
        os.kill(own, signal.SIGSTOP)
        for pid in (other, own):
            os.kill(pid, signal.SIGTERM)
        time.sleep(_STOPPED_S)
        os.kill(own, signal.SIGCONT)
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["later", "stopped"])
def test_a_signal_for_all_ranks_is_no_failure(then: str, tmp_path: Path) -> None:
    for rank in run_to_the_end(2, _end_rank_1, then, folder=tmp_path, timeout_s=_LIMIT_S):
        assert (rank.code, rank.err) == (_TERMINATED, "")


@pytest.mark.slow
def test_a_signal_for_one_rank_ends_the_others(tmp_path: Path) -> None:
    other, told = run_to_the_end(2, _end_rank_1, "nothing", folder=tmp_path, timeout_s=_LIMIT_S)
    assert (told.code, told.err) == (_TERMINATED, "")
    assert other.code == 1
    assert other.err.startswith(("error: rank 1 ended with exit code 143", "error: rank 1 died"))
    assert other.err.count("\n") == 1


def _leave_at_once(rank_that_leaves: int) -> None:
    launch_from_torch()
    dist.barrier()
    if dist.get_rank() == rank_that_leaves:
        os._exit(0)
    time.sleep(3.0)


def test_a_rank_that_leaves_by_os_exit_has_not_failed(tmp_path: Path) -> None:
    """Also where no agent tells its exit code, as for ranks that are started by hand."""
    for rank in run_to_the_end(2, _leave_at_once, 1, folder=tmp_path, timeout_s=_LIMIT_S):
        assert (rank.code, rank.err) == (0, "")


def _with_a_signal_of_the_script(kind: str) -> None:
    """SIGTERM reaches a rank whose script has set a handler after the launch, or has run an event loop."""
    seen: list[int] = []

    async def listen() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)

    launch_from_torch()
    if kind == "handler":
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        signal.signal(signal.SIGTERM, lambda number, frame: (seen.append(number), before(number, frame)))
    else:
        asyncio.run(listen())
        if kind == "blocked":  # the next operation takes the descriptor back from the event loop
            with failure.guard("an operation"):
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
                dist.recv(torch.zeros(1), 1 - dist.get_rank())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2.0)
    assert seen, "SIGTERM was ignored"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("handler", 0), ("event loop", _TERMINATED), ("blocked", _TERMINATED)])
def test_signals_are_the_scripts(kind: str, code: int, tmp_path: Path) -> None:
    for rank in run_to_the_end(2, _with_a_signal_of_the_script, kind, folder=tmp_path, timeout_s=_LIMIT_S):
        assert rank.code == code
        assert "error" not in rank.err or kind == "blocked"  # c10d complains of a store that ends first


def _catch_what_all_ranks_raise(kind: str) -> None:
    launch_from_torch()
    for error in (ConfigurationError, NonFiniteError, SynchronyError, VerificationError):
        with contextlib.suppress(error), failure.guard("an operation"):
            raise error("on all ranks")
    time.sleep(2.5)  # the others would have ended this rank by now


def _talk_in_a_thread(kind: str) -> None:
    """Operations of other threads, on a group of their own or on the job's, come at another time on each rank."""
    launch_from_torch()
    group = dist.group.WORLD if kind == "the job's group" else dist.new_group()
    training = dist.new_group(group_desc="mesh_dp")

    def talk() -> None:
        for _ in range(3):
            time.sleep(2.0 * dist.get_rank())
            dist.all_reduce(torch.ones(1), group=group)

    thread = threading.Thread(target=talk)
    thread.start()
    alive = torch.tensor(1)
    while alive:
        with failure.guard("optimizer.step"):
            dist.all_reduce(torch.ones(1), group=training)
        time.sleep(0.05)
        alive = torch.tensor(int(thread.is_alive()))
        dist.all_reduce(alive, op=dist.ReduceOp.MAX, group=training)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (_catch_what_all_ranks_raise, ""),
        (_talk_in_a_thread, "the job's group"),
        (_talk_in_a_thread, "a group of its own"),
    ],
)
def test_a_healthy_job_is_not_ended(job: Callable[[str], None], kind: str, tmp_path: Path) -> None:
    for rank in run_to_the_end(2, job, kind, folder=tmp_path, timeout_s=3 * _LIMIT_S):
        assert (rank.code, rank.err) == (0, "")


def test_an_error_that_a_script_handles_names_the_rank() -> None:
    """Not gloo's, which names a port."""
    cause = failure.Failure.found(1, "was ended by SIGKILL")
    monitor = SimpleNamespace(rank=0, cause_of=lambda error, own: cause, publish=lambda found: found)
    with mock.patch.object(hooks._Process, "monitor", monitor):
        with pytest.raises(RuntimeError, match="^error: rank 1 was ended by SIGKILL$"), failure.guard("an operation"):
            raise RuntimeError("Read error [127.0.0.1]:4711: Connection reset by peer")
        with pytest.raises(ValueError, match="mine"), failure.guard("an operation"):
            raise ValueError("mine")


def _save_on_rank_0(then: str, layout: str, folder: str) -> None:
    launch_from_torch()
    case = Case(recipe=Recipe(family="llama", head="causal_lm"), layout=layout)
    booster = Booster(plugin=HybridParallelPlugin(**case.plugin_options))
    model = case.recipe.model()
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if dist.get_rank() == 0:
        model.unwrap().save_pretrained(folder)
        saved = type(model.unwrap()).from_pretrained(folder, dtype=model.dtype).state_dict()
        expected = case.recipe.model().state_dict()
        assert set(saved) == set(expected) and all(torch.equal(saved[name], each) for name, each in expected.items())
        assert not Path(f"{folder}-parts").exists()
    if then == "waits":
        dist.barrier()
        model.save_pretrained(folder)  # all ranks again


@pytest.mark.slow
@pytest.mark.parametrize(("then", "layout"), [("waits", "tp2"), ("ends", "pp2"), ("ends", "tp2")])
def test_what_rank_0_saves_alone_is_whole(then: str, layout: str, tmp_path: Path) -> None:
    """The others wait for it elsewhere, or their scripts have ended."""
    folder = str(tmp_path / "model")
    for rank in run_to_the_end(2, _save_on_rank_0, then, layout, folder, folder=tmp_path / "ranks"):
        assert rank.code == 0, rank.err
