"""One save of a checkpoint: it appears whole or not at all.

Files are written into `<name>.partial`, which no load ever looks at. A new checkpoint then takes its name in one
rename. Where the name exists already, the new files join the old ones under other names, and the exchange of the
manifest, one rename too, makes them the checkpoint; nothing that the old manifest does not list is ever deleted.
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
    """Where a save of `path` is written."""
    return path.with_name(f"{path.name}{PARTIAL}")


class PendingSave:
    """A save that is going on, as its first rank sees it: an empty directory, which is locked.

    The lock tells other runs in the same folder from what a killed run left; it ends with the process.

    Args:
        path: where the checkpoint is to be.

    Attributes:
        sequence: its number.

    Raises:
        ConfigurationError: the place is taken by something else.
        OSError: the directory cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.directory = path, partial_directory(path)
        if path.name.endswith((PARTIAL, REMOVED)):
            raise ConfigurationError(f"{path} ends like an unfinished save; give another name, say {path.stem}")
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
        """Let the files in the directory become the checkpoint.

        Raises:
            ConfigurationError: a file that a rank wrote is not here: the ranks do not share the file system.
            OSError: something cannot be written.
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
        """Throw away what was written, after a failure; what cannot be removed is left to the next save."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError, ConfigurationError):
            self._remove_unlisted()

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            # Said in words: a process that was forked since, a worker of a data loader, has the descriptor too.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _remove_older(self) -> None:
        """What a save of the same name left that was killed."""
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
        """The exchange of the manifest is the moment in which the new checkpoint takes the old one's place."""
        for name in manifest.files:
            os.replace(self.directory / name, self.path / name)
        sync_directory(self.path)
        os.replace(self.directory / MANIFEST, self.path / MANIFEST)
        sync_directory(self.path)
        with suppress(OSError):  # the new checkpoint is complete; what stays goes with the next one
            self._remove_unlisted()
            self.directory.rmdir()

    def _remove_unlisted(self) -> None:
        """Remove the files that the manifest in place does not name: an older save's, or this one's if it failed."""
        manifest = self.path / MANIFEST
        listed = Manifest.read(manifest).files if manifest.exists() else {}
        for file in data_files(self.path):
            if file.name not in listed:
                file.unlink()


def _make_durably(directory: Path) -> None:
    """Make a directory and those above it, so that a power failure does not lose their names."""
    if not directory.is_dir():
        _make_durably(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _write_durably(path: Path, content: bytes) -> None:
    with naming(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
