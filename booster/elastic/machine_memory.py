"""Directory in the memory of a machine, which outlives the ranks that write into it, and ends with its agent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "booster-elastic-"
_LOCK, _PIECES = "lock", "pieces"
_SHARED_MEMORY = Path("/dev/shm")


class MachineMemory:
    """A new directory; those of agents that were killed are removed.

    Args:
        parent: where it is created; None for the shared memory of the machine.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
            parent = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
        _remove_unowned(parent)
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        self._lock = _lock(new)
        (new / _PIECES).mkdir()
        self.folder = new.rename(new.with_name(new.name[1:]))  # locked before others can find it

    def newest_snapshot(self) -> int:
        """Return the number of the newest snapshot of which this machine has a part; 0 if there is none."""
        names = os.listdir(self.folder / _PIECES)
        numbers = [name.partition(".")[0] for name in names if name.endswith(".json")]
        return max((int(number) for number in numbers if number), default=0)  # hidden files are being written

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """Lock a directory until this process ends; return None if another process has locked it.

    In a directory that everyone writes to, others can plant links and directories with any name.

    Raises:
        OSError: it is no directory of this user alone.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(place)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{folder} belongs to others")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(_LOCK, flags, 0o600, dir_fd=place)
    finally:
        os.close(place)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_unowned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
