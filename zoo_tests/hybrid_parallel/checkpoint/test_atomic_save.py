"""Files of checkpoints that are damaged, cannot be written, or are not what they seem; saves beside training.

What breaks here first: an error that one rank alone knows of, and what is removed or found that should not be. Look in
`atomic_save.py` and `manifest.py` of `plugins/hybrid_parallel/checkpoint`.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest
from zoo_tests.campaigns.crashes.damage import DAMAGES, load_damaged, save_some, undetected
from zoo_tests.campaigns.crashes.marked import MarkedTraining
from zoo_tests.campaigns.crashes.system_calls import SystemCalls
from zoo_tests.harness.ranks import distributed, run_on_ranks

DAMAGED = 100
WITHIN_S = 10.0


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# ----- damaged -----


@pytest.mark.slow
def test_every_damage_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    run_on_ranks(2, save_some, folder)
    done, missed = undetected(folder, DAMAGED)
    assert done.total() == DAMAGED and missed == []
    with mock.patch.object(Manifest, "verify_file", lambda *_: None):
        assert len(undetected(folder, DAMAGED)[1]) > DAMAGED / 2, "and with nothing compared it would not be"
    for index, (kind, name) in enumerate((kind, name) for kind in DAMAGES for name in ("rank0.safetensors", "json")):
        told = run_on_ranks(2, load_damaged, folder, kind, name, index)
        assert told[0] == told[1] and len(told[0]) == 1, "all ranks are told the same"
        assert "/step-3" in told[0][0] and "; " in told[0][0]


@distributed(2)
def test_the_tensor_that_is_damaged_is_named(tmp_path: Path) -> None:
    training = MarkedTraining()
    training.save(tmp_path / "state", 1)
    file = next((tmp_path / "state").glob("*rank1*"))
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[content.rindex(b"optimizer") - 1] ^= 1
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(ConfigurationError, match=rf"{file} is damaged in its header; load another checkpoint"):
        training.load(tmp_path / "state")
    dist.barrier()
    if dist.get_rank() == 0:
        content[content.rindex(b"optimizer") - 1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(ConfigurationError, match=rf"{file} is damaged in the tensor [a-z]+/.*; load another"):
        training.load(tmp_path / "state")


@distributed(2)
def test_a_file_that_cannot_be_read_on_one_rank(tmp_path: Path) -> None:
    training = MarkedTraining()
    for step in (1, 2):
        training.save(tmp_path / str(step), step)
    place = "plugins.hybrid_parallel.checkpoint.tensor_file.checksum_in_file"
    broken = mock.patch(place, _raising(OSError(errno.EIO, "Input/output error")))
    with (
        broken if dist.get_rank() == 1 else nullcontext(),
        pytest.raises(
            ConfigurationError, match=rf"OSError on rank 1: .*error: '{tmp_path}/2/state-2-rank1.safetensors'"
        ),
    ):
        training.load(tmp_path / "2")
    assert training.marks() == [-1]


# ----- not written -----


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@contextmanager
def failing_at(call: int, error: int) -> Iterator[SystemCalls]:
    """The system refuses one of this rank's calls."""

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == call:
            raise OSError(error, os.strerror(error), *[str(arg) for arg in args[:1] if not isinstance(arg, int)])

    with SystemCalls(before) as calls:
        yield calls


def _fail_everywhere(directory: Path, rank: int, asynchronous: bool, exists: bool) -> int:
    """Let every call of a save on one rank fail in turn; how often that was an error."""
    training, own, errors = MarkedTraining(), dist.get_rank() == rank, 0
    path = directory / "old" if exists else directory / "new"
    training.save(directory / "old", 1)
    for call in range(200):
        training.save(directory / "old", 1)
        assert names(directory) == ["old"] and len(names(directory / "old")) == 3
        dist.barrier()
        with failing_at(call if own else -1, errno.ENOSPC) as calls:
            began, message = time.perf_counter(), ""
            try:
                training.save(path, 2, asynchronous=asynchronous)
                training.booster.finish_saving()
            except ConfigurationError as error:
                message = str(error)
        assert time.perf_counter() - began < WITHIN_S
        refused = calls.names[call : call + 1]
        told = _all([message, bool(refused)])
        assert len({text for text, _ in told}) == 1, "all ranks are told the same"
        if message:
            errors += 1
            assert f"on rank {rank}: [Errno 28] No space left on device: '{directory}" in message
        step = training.load(directory, resume="latest")
        assert step == (1 if message else 2) or call >= 15, "an error behind the moment is one of durability"
        if message:  # what could not be removed is none, and goes with the next save
            assert names(directory) in (["old"], ["new", "old"])
            assert {len(names(each)) for each in directory.iterdir()} == {3}
        dist.barrier()
        if own:
            shutil.rmtree(directory / "new", ignore_errors=True)
        dist.barrier()
        if not any(found for _, found in told):
            return errors
    raise AssertionError("a save has no end")


def _all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "asynchronous", "exists"), [(0, False, True), (0, True, False), (1, False, False)])
def test_a_full_disk_at_any_call_of_one_rank_is_an_error_on_all(
    rank: int, asynchronous: bool, exists: bool, tmp_path: Path
) -> None:
    assert run_on_ranks(2, _fail_everywhere, tmp_path, rank, asynchronous, exists)[0] > 5


@distributed(2)
def test_a_limit_on_the_size_of_files_is_an_error_on_all(tmp_path: Path) -> None:
    """A real refusal by the system, which needs no rights."""
    training = MarkedTraining()
    training.save(tmp_path / "1", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ConfigurationError, match="on rank 1: .* too large: '.*/2.partial/state-2-rank1.safetensor"):
            training.save(tmp_path / "2", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["1"] and training.load(tmp_path, resume="latest") == 1
    training.save(tmp_path / "2", 2)
    assert training.load(tmp_path, resume="latest") == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    run_on_ranks(2, _fill, small_disk)


def _fill(disk: Path) -> None:
    training, filler = MarkedTraining(), disk / "filler"
    training.save(disk / "1", 1)
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - 8192)
    dist.barrier()
    began = time.perf_counter()
    with pytest.raises(ConfigurationError, match=rf"on rank [01]: .*No space left on device: '{disk}/2.partial"):
        training.save(disk / "2", 2)
    handle = training.save(disk / "3", 3, asynchronous=True)
    with pytest.raises(ConfigurationError, match=rf"asynchronous save of {disk}/3 failed: .*No space left on device"):
        training.booster.latest_checkpoint(disk)
    with pytest.raises(ConfigurationError, match="No space left on device"):  # which the script handles
        training.save(disk / "4", 4, asynchronous=True).wait()
    assert handle.is_finished and time.perf_counter() - began < WITHIN_S
    assert names(disk) == ["1", "filler"] and training.load(disk, resume="latest") == 1
    dist.barrier()
    if dist.get_rank() == 0:
        filler.unlink()
    dist.barrier()
    training.save(disk / "4", 4)
    assert training.load(disk, resume="latest") == 4


_PLACES = ("atomic_save.Staging.copy", "io.take_snapshot", "dcp_storage.TensorFileWriter")


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("out of memory"), TypeError("a bug")], ids=repr)
@pytest.mark.parametrize("place", _PLACES)
def test_any_error_of_one_rank_is_one_on_all(error: Exception, place: str, tmp_path: Path) -> None:
    run_on_ranks(2, _raise_in, error, f"plugins.hybrid_parallel.checkpoint.{place}", tmp_path)


def _raise_in(error: Exception, place: str, directory: Path) -> None:
    training = MarkedTraining()
    fault = mock.patch(place, _raising(error)) if dist.get_rank() == 1 else nullcontext()
    for asynchronous in (True,) if "Staging" in place else (False, True):
        with fault, pytest.raises(ConfigurationError, match=f"{type(error).__name__} on rank 1: {error}"):
            training.save(directory / "1", 1, asynchronous=asynchronous)
            training.booster.finish_saving()
        assert names(directory) == []
    training.save(directory / "2", 2)
    assert training.load(directory / "2") == 2


@distributed(2)
def test_places_that_will_not_do(tmp_path: Path) -> None:
    training, rank = MarkedTraining(), dist.get_rank()
    if rank == 0:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "a.partial").mkdir()
        (tmp_path / "a.partial" / "notes.txt").write_text("mine")
    dist.barrier()
    refused = {
        tmp_path / "file": "file is a file; give a directory, which may be a new one",
        tmp_path / "file" / "state": "NotADirectoryError on rank 0: .*'.*/file'|FileExistsError on rank 0: .*'.*/file'",
        tmp_path / "a": "a.partial, where the save is to be written, is something else; move it away",
        tmp_path / "b.partial": "b.partial has the suffix of an unfinished save; give another name, say b",
        Path("/proc/state"): "Error on rank 0: .*/proc/state",
        tmp_path / f"rank-{rank}": f"rank 1 was given the directory {tmp_path}/rank-1, rank 0 {tmp_path}/rank-0; give",
        tmp_path / ("x" * 250): "File name too long",
    }
    for asynchronous in (False, True):
        for path, sentence in refused.items():
            with pytest.raises(ConfigurationError, match=sentence):
                training.save(path, 1, asynchronous=asynchronous)
                training.booster.finish_saving()
    assert names(tmp_path) == ["a.partial", "file"] and names(tmp_path / "a.partial") == ["notes.txt"]
    with pytest.raises(ConfigurationError, match="keep_last=0 would keep nothing; use keep_last=1 or more"):
        training.save(tmp_path / "c", 1, keep_last=0)
    with pytest.raises(ConfigurationError, match="resume='newest' is not known; use resume='latest'"):
        training.load(tmp_path, resume="newest")
    with pytest.raises(ConfigurationError, match="holds no checkpoint; give the folder of the checkpoints"):
        training.load(tmp_path, resume="latest")
