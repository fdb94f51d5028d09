"""Folders of checkpoints: which is the latest, which are kept, whose files stay; saves that training goes on beside.

What breaks here first: something removed that is a user's, and a snapshot of another moment than that of the call. Look
in `atomic_save.py` of `plugins/hybrid_parallel/checkpoint`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint import atomic_save as partial
from plugins.hybrid_parallel.checkpoint.dcp_storage import write_tensors
from zoo_tests.campaigns.crashes.marked import MarkedTraining
from zoo_tests.harness.ranks import distributed, under_load
from zoo_tests.hybrid_parallel.checkpoint.test_atomic_save import names

PUBLISH = "plugins.hybrid_parallel.checkpoint.atomic_save.PendingSave.publish"


@pytest.mark.slow
@distributed(2)
def test_which_are_kept(tmp_path: Path) -> None:
    training = MarkedTraining()
    assert training.booster.latest_checkpoint(tmp_path / "nothing") is None
    for step in (10, 9, 11, 8):  # the latest is the one saved last, whatever it is called
        training.save(tmp_path / f"v1.{step} ä [x]*", step, keep_last=2)
        dist.barrier()
        assert training.booster.latest_checkpoint(tmp_path) == str(tmp_path / f"v1.{step} ä [x]*")
    assert names(tmp_path) == ["v1.11 ä [x]*", "v1.8 ä [x]*"]
    training.save(tmp_path / "all", 1)
    assert len(names(tmp_path)) == 3 and training.load(tmp_path, resume="latest") == 1


@distributed(2)
def test_nothing_of_a_user_is_removed(tmp_path: Path) -> None:
    """His files in a checkpoint, his directories that look like one, his links, a damaged checkpoint."""
    training = MarkedTraining()
    for step in (1, 2):
        training.save(tmp_path / str(step), step)
    if dist.get_rank() == 0:
        (tmp_path / "1" / "notes.txt").write_text("mine")
        for name in ("app", "app.partial", "old.removed"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "manifest.json").write_text("{}")
            (tmp_path / name / "icon").write_text("mine")
        (tmp_path / "link").symlink_to("2")
        content = bytearray((tmp_path / "2" / "manifest.json").read_bytes())
        content[-20] ^= 1
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "manifest.json").write_bytes(content)
    dist.barrier()
    training.save(tmp_path / "1", 3)
    assert (tmp_path / "1" / "notes.txt").read_text() == "mine" and len(names(tmp_path / "1")) == 4
    training.save(tmp_path / "4", 4, keep_last=1)
    dist.barrier()
    assert names(tmp_path) == ["1", "4", "app", "app.partial", "broken", "link", "old.removed"]
    assert names(tmp_path / "1") == ["notes.txt"], "the checkpoint is gone, the directory is not"
    assert training.booster.latest_checkpoint(tmp_path) == str(tmp_path / "4")
    assert training.load(tmp_path, resume="latest") == 4


@distributed(2)
def test_links_and_relative_paths(tmp_path: Path) -> None:
    training, before = MarkedTraining(), Path.cwd()
    os.chdir(tmp_path)
    try:
        saved = training.save(Path("runs") / "1", 1, asynchronous=True)
        os.chdir(before)  # while it is written
        saved.wait()
        assert saved.path == tmp_path / "runs" / "1" and names(tmp_path) == ["runs"]
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "latest").symlink_to(tmp_path / "runs" / "1")
        dist.barrier()
        assert training.load(tmp_path / "latest") == 1
        training.save(tmp_path / "latest", 2)
        assert (tmp_path / "latest").is_symlink() and training.load(tmp_path / "runs" / "1") == 2
    finally:
        os.chdir(before)


@distributed(2)
def test_two_runs_share_a_folder(tmp_path: Path) -> None:
    """A save of one is no remains for the other; the same name at the same time is refused."""
    training = MarkedTraining()
    other = MarkedTraining()
    go_on = threading.Event()
    publish = partial.PendingSave.publish

    def slowly(self: partial.PendingSave, manifest: object) -> None:
        if self.path.name == "slow":
            assert go_on.wait(30)
        publish(self, manifest)

    with mock.patch(PUBLISH, slowly):
        saved = training.save(tmp_path / "slow", 1, asynchronous=True)
        dist.barrier()
        while not (tmp_path / "slow.partial").exists():
            pass
        other.save(tmp_path / "quick", 2, keep_last=1)
        with pytest.raises(
            ConfigurationError, match="slow is being saved by another run; give each run its own folder"
        ):
            other.save(tmp_path / "slow", 3)
        assert not saved.is_finished
        dist.barrier()
        go_on.set()
        saved.wait()
    assert training.load(tmp_path / "slow") == 1 and other.load(tmp_path / "quick") == 2


# ----- beside training -----


@distributed(2)
def test_a_snapshot_is_that_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Training and the extras go on changing before a byte is written."""
    training, extras, go_on = MarkedTraining(), {"seen": [1]}, threading.Event()
    write = "plugins.hybrid_parallel.checkpoint.io.write_tensors"
    with mock.patch(write, lambda *given: go_on.wait(30) and write_tensors(*given)):
        saved = training.save(tmp_path / "1", 1, asynchronous=True, extras=extras)
        training.mark(-1)
        extras["seen"].append(2)
        assert not saved.is_finished and not (tmp_path / "1").exists()
        go_on.set()
        duration = saved.wait()
    assert 0 < saved.stall_s <= duration and saved.is_finished
    assert training.load(tmp_path / "1") == 1
    assert training.booster.load_checkpoint(tmp_path / "1")["extras"] == {"seen": [1]}


@distributed(2)
def test_one_save_is_in_flight_at_most(tmp_path: Path) -> None:
    training, running, most = MarkedTraining(), [], []
    publish = partial.PendingSave.publish

    def counted(self: partial.PendingSave, manifest: object) -> None:
        running.append(self)
        most.append(len(running))
        publish(self, manifest)
        running.remove(self)

    with mock.patch(PUBLISH, counted):
        for step in range(6):
            training.save(tmp_path / str(step), step, asynchronous=step != 3, keep_last=4)
            training.mark(-1)
        assert (tmp_path / "4").exists() or dist.get_rank(), "a call waits for the save before"
        assert training.load(tmp_path, resume="latest") == 5, "and so does loading"
    assert set(most) <= {1} and names(tmp_path) == ["2", "3", "4", "5"]


_SCRIPT = """
import sys, tempfile, time
from pathlib import Path
import torch, torch.distributed as dist
from plugins.hybrid_parallel.checkpoint import dcp_storage
from plugins.hybrid_parallel.checkpoint.atomic_save import PendingSave
from zoo_tests.campaigns.crashes.marked import MarkedTraining
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
training, publish = MarkedTraining(), PendingSave.publish
PendingSave.publish = lambda *given: time.sleep(0.5) or publish(*given)
training.save(Path(sys.argv[1]), 7, asynchronous=True)
training.mark(-1)
if sys.argv[2] == "error":
    raise RuntimeError("training failed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["quiet", "error"])
def test_a_save_in_flight_is_finished_at_the_end_of_the_interpreter(end: str, tmp_path: Path) -> None:
    """Also where the training ends by an exception."""
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "state"), end]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=under_load(120), cwd=Path(__file__).parents[3]
    )
    assert (done.returncode, "training failed" in done.stderr) == ((1, True) if end == "error" else (0, False))
    _load_seven(tmp_path)


@distributed(1)
def _load_seven(directory: Path) -> None:
    assert MarkedTraining().load(directory, resume="latest") == 7
