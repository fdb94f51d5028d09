"""Atomic save of a checkpoint: it appears completely or not at all.

Files are written into `<name>.partial`, which no load reads. A new checkpoint gets its name in one rename. If the name
already exists, the new files are moved next to the old ones under different names, and replacing the manifest, again
one rename, makes them the checkpoint. Only files that a save wrote are ever deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.files.tensor_file import naming, sync_directory
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest
from plugins.hybrid_parallel.checkpoint.state.retention import (
    MANIFEST,
    PARTIAL,
    REMOVED,
    InUseError,
    data_files,
    holds_only_ours,
    lock_directory,
    locked,
    next_sequence,
)


def partial_directory(path: Path) -> Path:
    """Return the directory in which a save of `path` is written."""
    return path.with_name(f"{path.name}{PARTIAL}")


class PendingSave:
    """A save in progress, on rank 0: an empty, locked directory.

    The lock distinguishes a save of another run in the same folder from the remains of a killed run. It is released
    when the process ends.

    Args:
        path: final path of the checkpoint.

    Attributes:
        sequence: sequence number of the checkpoint.

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
        self._check_complete(manifest)
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

    def _check_complete(self, manifest: Manifest) -> None:
        for name, file in manifest.files.items():
            found = self.directory / name
            if not found.is_file() or found.stat().st_size != file.size:
                raise ConfigurationError(
                    f"{found} is not there for rank 0, though another rank wrote it; "
                    "give a directory on a file system that all ranks share"
                )

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
