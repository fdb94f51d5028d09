"""Checkpoint directories: finding complete checkpoints, and removing old ones and the remains of interrupted saves.

Only files that a save wrote are removed: a user's own files stay, and so does the directory that contains them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest, sequence_of

MANIFEST = "manifest.json"
PARTIAL, REMOVED = ".partial", ".removed"  # suffixes of directories that no load reads
_DATA_FILE = re.compile(r"state-\d+-rank\d+\.safetensors")
_logger = get_logger(__name__)


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
        Manifest.read(path / MANIFEST).check_sizes(path)
    except (ConfigurationError, OSError):
        return False
    return True


def keep_latest(path: Path, number: int) -> None:
    """Remove all but the newest `number` checkpoints in the folder of `path`.

    Damaged checkpoints and symbolic links are neither counted nor removed.
    """
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
    """Lock a directory within the context; yields whether the file system supports locks, so that the lock is certain.

    Raises:
        InUseError: another save holds the lock.
    """
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
