"""Memory that a model frees while it is built, returned to the system.

glibc takes blocks below a threshold from one heap. The threshold grows to 32 MiB as larger blocks are freed. A block
that is freed in the middle of the heap stays resident as a hole, and smaller blocks break up the hole: whole tensors
that are drawn and sliced one after the other left up to half a shard behind. `malloc_trim(3)` returns the pages of all
holes. `mallopt` would avoid the holes, but it would set the threshold for the training that follows, too.
"""

from __future__ import annotations

import ctypes

_LEAST = 2**20  # bytes
_SHARE = 50


def return_freed_memory() -> None:
    """Return freed memory to the system if the C library can; that of macOS, musl or Windows has no such function."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return
    trim(ctypes.c_size_t(0))


class FreedMemory:
    """Counts freed bytes, and returns them to the system whenever they are a fiftieth of a rank's shard, or 1 MiB.

    A return walks over the free blocks of the heap, which takes about 0.1 ms.

    Args:
        shard: bytes that the rank holds in the end.
    """

    def __init__(self, shard: int) -> None:
        self._limit = max(_LEAST, shard // _SHARE)
        self._freed = 0

    def add(self, size: int) -> None:
        """Count `size` bytes that were freed, at most, since the last call."""
        self._freed += size
        if self._freed >= self._limit:
            return_freed_memory()
            self._freed = 0
