"""Directories of checkpoints: how complete ones are found again, and how old ones and remains are removed.

Nothing is ever removed that a save did not write: a user's own files stay, and the directory with them.
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
PARTIAL, REMOVED = ".partial", ".removed"  # endings of names of directories that no load looks at
_DATA_FILE = re.compile(r"state-\d+-rank\d+\.safetensors")
_logger = get_logger(__name__)


class InUseError(OSError):
    """Another save holds the lock of a directory."""


def data_file(sequence: int, rank: int) -> str:
    """The name of a rank's file; saves under one name never share a file."""
    return f"state-{sequence}-rank{rank}.safetensors"


def data_files(directory: Path) -> list[Path]:
    """All files of this kind in a directory."""
    return [entry for entry in directory.iterdir() if _DATA_FILE.fullmatch(entry.name)]


def next_sequence(path: Path) -> int:
    """One more than that of any checkpoint beside `path`, or of itself."""
    known = [sequence_of(manifest) or 0 for manifest in path.parent.glob(f"*/{MANIFEST}")]
    return max(known, default=0) + 1


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the latest first; one whose age cannot be told counts as the latest."""
    found = [(sequence_of(manifest), manifest.parent) for manifest in folder.glob(f"*/{MANIFEST}")]
    found = [entry for entry in found if not entry[1].name.endswith((PARTIAL, REMOVED))]
    return [path for _, path in sorted(found, key=lambda entry: (entry[0] is None, entry[0] or 0), reverse=True)]


def is_whole(path: Path) -> bool:
    """Whether the manifest is sound and the files have their sizes; a changed byte in one is found at loading."""
    try:
        Manifest.read(path / MANIFEST).check_sizes(path)
    except (ConfigurationError, OSError):
        return False
    return True


def keep_latest(path: Path, number: int) -> None:
    """Remove all but the latest `number` of the checkpoints beside `path`.

    One that is damaged is neither counted nor removed; nor is a link.
    """
    sound = [each for each in checkpoints_in(path.parent) if not each.is_symlink() and is_whole(each)]
    for old in sound[number:]:
        if old != path:
            try:
                _remove(old)
            except OSError as error:  # the new checkpoint is complete: no reason to end the training
                _logger.warning("the old checkpoint %s could not be removed: %s", old, error)
            else:
                _logger.info("removed the old checkpoint %s", old)


def remove_remains(folder: Path) -> None:
    """Remove what interrupted saves and removals left in a folder, as far as nobody is writing it."""
    for left in folder.iterdir():
        # An error: somebody else is saving or cleaning there.
        with suppress(OSError):
            if left.name.endswith((PARTIAL, REMOVED)) and holds_only_ours(left):
                with locked(left) as is_certain:
                    if is_certain:
                        shutil.rmtree(left, ignore_errors=True)


def holds_only_ours(directory: Path) -> bool:
    """Whether a directory holds nothing but what a save writes."""
    if directory.is_symlink() or not directory.is_dir():
        return False
    return all(_DATA_FILE.fullmatch(entry.name) or entry.name == MANIFEST for entry in directory.iterdir())


def lock_directory(directory: Path) -> int | None:
    """Hold a directory until the descriptor is closed or the process ends, in whatever way.

    Returns:
        A descriptor; None where the file system has no locks.

    Raises:
        InUseError: another save holds it.
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
    """Hold a directory in the context; yields whether the file system has locks, so that nobody else can hold it.

    Raises:
        InUseError: another save holds it.
    """
    handle = lock_directory(directory)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _remove(checkpoint: Path) -> None:
    """So that what is interrupted leaves no half of a checkpoint under its name."""
    if holds_only_ours(checkpoint):
        removed = checkpoint.with_name(f"{checkpoint.name}{REMOVED}")
        os.rename(checkpoint, removed)
        shutil.rmtree(removed, ignore_errors=True)
        return
    (checkpoint / MANIFEST).unlink()
    for file in data_files(checkpoint):
        file.unlink()
