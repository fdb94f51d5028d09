"""Checkpoint directories: a save appears completely or not at all, also in the background; old and killed saves go.

Files are written into `<name>.partial`, which no load reads. A new checkpoint gets its name in one rename. If the name
already exists, the new files are moved next to the old ones under different names, and replacing the manifest, again
one rename, makes them the checkpoint. Only files that a save wrote are ever deleted: a user's own files stay, and so
does the directory that contains them.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.plugin import SavedCheckpoint
from plugins.hybrid_parallel.checkpoint.checks import check_size
from plugins.hybrid_parallel.checkpoint.global_tensor import GlobalTensor, TensorChunk
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest, naming, sequence_of, sync_directory
from plugins.hybrid_parallel.checkpoint.training_state import StateSnapshot

MANIFEST = "manifest.json"
PARTIAL, REMOVED = ".partial", ".removed"  # suffixes of directories that no load reads
_DATA_FILE = re.compile(r"state-\d+-rank\d+\.safetensors")
_logger = get_logger(__name__)


def partial_directory(path: Path) -> Path:
    """Return the directory in which a save of `path` is written."""
    return path.with_name(f"{path.name}{PARTIAL}")


class PendingSave:
    """A save in progress, on rank 0: an empty, locked directory.

    The lock distinguishes a save of another run in the same folder from the remains of a killed run. It is released
    when the process ends.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.directory = path, partial_directory(path)
        if path.name.endswith((PARTIAL, REMOVED)):
            raise ConfigurationError(f"{path} has the suffix of an unfinished save; give another name, say {path.stem}")
        if path.exists() and not path.is_dir():
            raise ConfigurationError(f"{path} is a file; give a directory, which may be a new one")
        try:
            self._remove_older()
            _make_durably(path.parent)
            self.directory.mkdir()
            self._lock = lock_directory(self.directory)
        except InUseError:
            raise ConfigurationError(f"{path} is being saved by another run; give each run its own folder") from None
        self.sequence = next_sequence(path)

    def publish(self, manifest: Manifest) -> None:
        """Make the files in the directory the checkpoint.

        Raises:
            ConfigurationError: a file that a rank wrote is not visible here: the ranks do not share the file system.
            OSError: a file cannot be written.
        """
        for name, file in manifest.files.items():
            found = self.directory / name
            if not found.is_file() or found.stat().st_size != file.size:
                raise ConfigurationError(
                    f"{found} is not there for rank 0, though another rank wrote it; "
                    "give a directory on a file system that all ranks share"
                )
        _write_durably(self.directory / MANIFEST, manifest.to_bytes())
        sync_directory(self.directory)
        try:
            os.rename(self.directory, self.path)  # a new name, or an empty directory
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._replace_content(manifest)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove what was written, after a failure; what cannot be removed is left to the next save."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError, ConfigurationError):
            self._remove_unlisted()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            # Unlock explicitly: processes forked since then, such as DataLoader workers, share the descriptor.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _remove_older(self) -> None:
        """Remove the remains of a killed save of the same name."""
        if not os.path.lexists(self.directory):
            return
        if not holds_only_ours(self.directory):
            raise ConfigurationError(
                f"{self.directory}, where the save is to be written, is something else; move it away"
            )
        with locked(self.directory):
            shutil.rmtree(self.directory)

    def _replace_content(self, manifest: Manifest) -> None:
        """Replace an existing checkpoint; replacing its manifest is the step that makes the new checkpoint current."""
        for name in manifest.files:
            os.replace(self.directory / name, self.path / name)
        sync_directory(self.path)
        os.replace(self.directory / MANIFEST, self.path / MANIFEST)
        sync_directory(self.path)
        with suppress(OSError):  # the new checkpoint is complete; the next save removes what remains
            self._remove_unlisted()
            self.directory.rmdir()

    def _remove_unlisted(self) -> None:
        """Remove data files that the current manifest does not list: an older save's, or this one's if it failed."""
        manifest = self.path / MANIFEST
        listed = Manifest.read(manifest).files if manifest.exists() else {}
        for file in data_files(self.path):
            if file.name not in listed:
                file.unlink()


def _make_durably(directory: Path) -> None:
    """Create a directory and its parents, and sync the new entries, so that they survive a power failure."""
    if not directory.is_dir():
        _make_durably(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _write_durably(path: Path, content: bytes) -> None:
    with naming(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# ----- finding and removing checkpoints -----


class InUseError(OSError):
    """Another save holds the lock of a directory."""


def data_file(sequence: int, rank: int) -> str:
    """Return the file name of a rank; saves under one name never share a file."""
    return f"state-{sequence}-rank{rank}.safetensors"


def data_files(directory: Path) -> list[Path]:
    """Return all data files in a directory."""
    return [entry for entry in directory.iterdir() if _DATA_FILE.fullmatch(entry.name)]


def next_sequence(path: Path) -> int:
    """Return a number above the sequence of `path` and of every other checkpoint in its folder."""
    known = [sequence_of(manifest) or 0 for manifest in path.parent.glob(f"*/{MANIFEST}")]
    return max(known, default=0) + 1


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first; those with an unreadable sequence number come first."""
    found = [(sequence_of(manifest), manifest.parent) for manifest in folder.glob(f"*/{MANIFEST}")]
    found = [entry for entry in found if not entry[1].name.endswith((PARTIAL, REMOVED))]
    return [path for _, path in sorted(found, key=lambda entry: (entry[0] is None, entry[0] or 0), reverse=True)]


def is_whole(path: Path) -> bool:
    """Return whether the manifest is valid and all files have their sizes; changed bytes are detected only at load."""
    try:
        for name, file in Manifest.read(path / MANIFEST).files.items():
            check_size(path / name, file.size)
    except (ConfigurationError, OSError):
        return False
    return True


def keep_latest(path: Path, number: int) -> None:
    """Remove all but the newest `number` checkpoints; damaged ones and links are neither counted nor removed."""
    sound = [each for each in checkpoints_in(path.parent) if not each.is_symlink() and is_whole(each)]
    for old in sound[number:]:
        if old != path:
            try:
                _remove(old)
            except OSError as error:  # the new checkpoint is complete, so training can continue
                _logger.warning("the old checkpoint %s could not be removed: %s", old, error)
            else:
                _logger.info("removed the old checkpoint %s", old)


def remove_remains(folder: Path) -> None:
    """Remove the remains of interrupted saves and removals in a folder, unless another process may be writing them."""
    for left in folder.iterdir():
        # An OSError means that another process is saving or cleaning up there.
        with suppress(OSError):
            if left.name.endswith((PARTIAL, REMOVED)) and holds_only_ours(left):
                with locked(left) as is_certain:
                    if is_certain:
                        shutil.rmtree(left, ignore_errors=True)


def holds_only_ours(directory: Path) -> bool:
    """Return whether a directory contains only files that a save writes."""
    if directory.is_symlink() or not directory.is_dir():
        return False
    return all(_DATA_FILE.fullmatch(entry.name) or entry.name == MANIFEST for entry in directory.iterdir())


def lock_directory(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed or the process ends, even if it is killed.

    Returns:
        A descriptor; None if the file system does not support locks.

    Raises:
        InUseError: another save holds the lock.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InUseError(error.errno, "another save is writing it", str(directory)) from None
        return None
    return handle


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Lock a directory, or raise InUseError; yields whether the file system has locks, and it is certain."""
    handle = lock_directory(directory)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; rename it first if possible, so that an interruption leaves no partial checkpoint."""
    if holds_only_ours(checkpoint):
        removed = checkpoint.with_name(f"{checkpoint.name}{REMOVED}")
        os.rename(checkpoint, removed)
        shutil.rmtree(removed, ignore_errors=True)
        return
    (checkpoint / MANIFEST).unlink()
    for file in data_files(checkpoint):
        file.unlink()


class BackgroundWriter:
    """A single thread that completes saves; the interpreter waits for it at exit."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="booster-checkpoint")
        self._last: SavedCheckpoint | None = None

    def start(self, path: Path, began: float, work: Callable[[], None]) -> SavedCheckpoint:
        """Run `work` in the background; the previous save must have been finished."""

        def timed() -> float:
            work()
            return time.perf_counter() - began

        future = self._threads.submit(timed)
        future.add_done_callback(lambda done: _report(path, done))
        self._last = SavedCheckpoint(path, time.perf_counter() - began, future)
        return self._last

    def finish(self) -> None:
        """Wait for the save in progress, if any."""
        last, self._last = self._last, None
        if last is None or last.has_raised:
            return
        try:
            last.wait()
        except ConfigurationError as error:
            raise ConfigurationError(f"the asynchronous save of {last.path} failed: {error}") from error


def _report(path: Path, done: Future[float]) -> None:
    if done.exception() is not None:
        _logger.error("the checkpoint %s was not saved: %s", path, done.exception())
    else:
        _logger.info("the checkpoint %s was saved in %.2f s", path, done.result())


_ALIGNMENT = 64  # bytes


class Staging:
    """Host memory that is reused between saves, because allocating it takes longer than filling it."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def copy(self, snapshot: StateSnapshot) -> StateSnapshot:
        """Copy a snapshot into the staging memory, overwriting the previous one."""
        values = [part.values for tensor in snapshot.tensors.values() for part in tensor.rectangles]
        copies = iter(self._copies(values))
        tensors = {
            name: GlobalTensor(
                tensor.shape,
                tensor.dtype,
                [TensorChunk(part.offsets, part.sizes, next(copies)) for part in tensor.rectangles],
            )
            for name, tensor in snapshot.tensors.items()
        }
        return dataclasses.replace(snapshot, tensors=tensors)

    def _copies(self, values: Iterable[Tensor]) -> list[Tensor]:
        values = list(values)
        has_gpu = any(value.is_cuda for value in values)
        room = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values]
        sizes, places = blocks_of_powers(room) if has_gpu else _one_block(room)
        present = [block.numel() for block in self._blocks]
        if len(sizes) > len(present) or any(size > there for size, there in zip(sizes, present, strict=False)):
            self._blocks = []  # free the old memory first
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=has_gpu) for size in sizes]
        copies = []
        for value, (block, start) in zip(values, places, strict=True):
            target = self._blocks[block][start : start + value.nbytes].view(value.dtype).view(value.shape)
            copies.append(target.copy_(value, non_blocking=True))
        if has_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


def blocks_of_powers(room: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Distribute pieces over blocks of powers of two.

    torch allocates page-locked memory in powers of two: one block for everything would take up to twice its size.

    Args:
        room: bytes of each piece.

    Returns:
        The sizes of the blocks, and (block, offset) of each piece.
    """
    left = sorted(range(len(room)), key=lambda index: -room[index])
    sizes: list[int] = []
    places = [(0, 0)] * len(room)
    while left:
        total, largest = sum(room[index] for index in left), room[left[0]]
        # The largest power of two that the pieces fill, or the smallest that holds the largest piece.
        size = max(1 << max(total.bit_length() - 1, 0), 1 << max(largest - 1, 0).bit_length())
        used, rest = 0, []
        for index in left:
            if used + room[index] > size:
                rest.append(index)
                continue
            places[index] = (len(sizes), used)
            used += room[index]
        sizes.append(size)
        left = rest
    return sizes, places


def _one_block(room: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    starts = [0, *accumulate(room)]
    return [starts[-1]], [(0, start) for start in starts[:-1]]
