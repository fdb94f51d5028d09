"""SIGTERM for all ranks is no failure, however late it reaches some of them; for one rank alone it is one.

What breaks here first: a rank takes the end of another, which got the signal first, for a failure. Look at `_told` in
`booster/failure/monitor.py`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from booster.launch import launch_from_torch
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
