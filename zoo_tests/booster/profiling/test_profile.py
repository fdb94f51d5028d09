"""`booster run --profile N`: one trace of all ranks, their memory, and one sentence, whatever the loop.

What breaks here first: a private part of torch's traces (`booster/profiling.py`), or an optimizer whose `step`
is not a method.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from booster.launch import PROFILE_FOLDER, PROFILE_STEPS
from booster.profiling import JobProfile, StepProfile, memory_of_this_rank
from zoo_tests.booster.cli.started import Ended, Started
from zoo_tests.booster.profiling import job
from zoo_tests.harness.ranks import run_on_ranks


def _run(folder: Path, steps: int, *arguments: str) -> Ended:
    options = ("--nproc-per-node", "2", "--profile", str(steps), "--profile-output", str(folder))
    return Started("-m", "booster", "run", *options, str(Path(job.__file__)), *arguments).ended()


def _trained(scratch: str, steps: int, *arguments: str) -> None:
    """Train on this rank as under `booster run --profile`."""
    asked = {PROFILE_STEPS: str(steps), PROFILE_FOLDER: scratch}
    with mock.patch.dict(os.environ, asked), mock.patch.object(sys, "argv", ["job.py", *arguments]):
        job.main()
        assert PROFILE_STEPS not in os.environ, "a second model would be traced too"
    dist.barrier()


def _trained_and_ended(*arguments: Any) -> None:
    """Train on this rank, and then do what the profile does at the end of the interpreter."""
    with mock.patch.object(atexit, "register", wraps=atexit.register) as at_exit:
        _trained(*arguments)
    registered = [call.args[0] for call in at_exit.call_args_list]
    (close,) = [each for each in registered if isinstance(getattr(each, "__self__", None), StepProfile)]
    close()
    dist.barrier()


def _events(folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    trace = json.loads((folder / "trace.json").read_text())
    return [event for event in trace["traceEvents"] if wanted.items() <= event.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("pp_size", "loop"), [(2, "ordinary"), (1, "ordinary"), (1, "pipeline")])
def test_every_loop(pp_size: int, loop: str, tmp_path: Path) -> None:
    profile = JobProfile(2, tmp_path)
    run_on_ranks(2, _trained, str(profile.scratch), 2, str(pp_size), "3", loop)
    assert profile.finish().startswith("the profile of 2 steps on 2 ranks is in ")
    for rank in range(2):
        names = [each["name"] for each in _events(tmp_path, pid=rank, cat="user_annotation")]
        assert [name for name in names if "Step" in name] == ["ProfilerStep#1", "ProfilerStep#2"]
    actions = [each["name"] for each in _events(tmp_path, cat="pipeline")]
    if pp_size == 2:
        assert len(actions) == 2 * 8 and "backward 1, stage 0" in actions
    else:
        assert bool(actions) == (loop == "pipeline")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    ended = _run(folder, 2, "2", "3", "pipeline")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == (
        f"note: the profile of 2 steps on 2 ranks is in {folder}/trace.json, and their memory in {folder}/memory.json\n"
    )
    assert {path.name for path in folder.iterdir()} == {"trace.json", "memory.json"}
    names = {event["pid"]: event["args"]["name"] for event in _events(folder, name="process_name")}
    assert names == {0: "rank 0", 1: "rank 1", 2: "pipeline"}
    for rank in range(2):
        assert len([each for each in _events(folder, pid=rank, ph="X") if each["name"] == "aten::addmm"]) > 4
        steps = [each["name"] for each in _events(folder, pid=rank) if each["name"].startswith("ProfilerStep")]
        assert steps == ["ProfilerStep#1", "ProfilerStep#2"], "the first step is warm-up"
    actions = _events(folder, cat="pipeline")
    expected = [
        f"{kind} {index}, stage {rank}" for rank in (0, 1) for kind in ("forward", "backward") for index in (0, 1)
    ]
    assert sorted(each["name"] for each in actions) == sorted(2 * expected)
    assert all(each["tid"] == int(each["name"][-1]) and each["dur"] > 0 for each in actions)
    for each in json.loads((folder / "memory.json").read_text())["ranks"]:
        assert each["peak_resident_bytes"] > 2**20 and each["tensors"][0]["bytes"] > 0


@pytest.mark.slow
def test_a_script_that_ends_early_leaves_what_there_is(tmp_path: Path) -> None:
    profile = JobProfile(3, tmp_path)
    run_on_ranks(2, _trained_and_ended, str(profile.scratch), 3, "2", "2", "pipeline")
    what = r"the script ended after 1 of the 3 steps to profile; they are in \S+/trace.json, and [^\n]*"
    assert re.fullmatch(what, sentence := profile.finish()), sentence


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        (
            [{"steps": 0}, {"steps": 0}],
            "no profile was written: the script ended before the first of the 3 steps to profile, which follow a step "
            "of warm-up",
        ),
        ([], "no profile was written: the script gave no model with an optimizer to booster.boost"),
    ],
    ids=["warm-up", "none"],
)
def test_a_script_without_steps(described: list[dict[str, int]], sentence: str, tmp_path: Path) -> None:
    profile = JobProfile(3, tmp_path)
    for rank, description in enumerate(described):
        (profile.scratch / f"rank{rank}.json").write_text(json.dumps(description))
    assert profile.finish() == sentence
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.slow
def test_a_rank_that_cannot_write_goes_on_training(tmp_path: Path) -> None:
    profile = JobProfile(1, tmp_path)
    scratch = str(profile.scratch)
    shutil.rmtree(scratch)
    run_on_ranks(2, _trained, scratch, 1, "2", "3", "pipeline")
    assert profile.finish().startswith("no profile was written: ")


def test_several_machines_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    profile = JobProfile(1, tmp_path, alone=False)
    content = {"traceEvents": [{"ph": "X", "name": "aten::mm", "pid": 9, "tid": 9, "ts": 0, "dur": 1}]}
    (profile.scratch / "rank3.trace.json").write_text(json.dumps(content))
    (profile.scratch / "rank3.json").write_text(json.dumps({"steps": 1, "trace": "rank3.trace.json", "memory": {}}))
    (profile.scratch / "rank3.pickle").write_bytes(b"snapshot")
    assert "the profile of 1 step on 1 rank is in" in profile.finish()
    assert {path.name for path in tmp_path.iterdir()} == {
        "trace-node7.json", "memory-node7.json", "memory_rank3.pickle",
    }  # fmt: skip


@pytest.mark.slow
def test_memory_counts_a_storage_once() -> None:
    weight = torch.zeros(1000, 1000)
    views = [weight[index] for index in range(5)]
    report = memory_of_this_rank({weight.data_ptr(): "my.weight"})
    [group] = [each for each in report["tensors"] if each["shape"] == [1000, 1000]]
    assert (group["bytes"], group["count"], group["parameter"]) == (4_000_000, 1, "my.weight") and views
