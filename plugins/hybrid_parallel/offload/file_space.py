"""FileSpace: which parts of a file are free, so that it grows only where none is large enough."""

from __future__ import annotations

import bisect
from collections import deque


class FileSpace:
    """Ranges of a file: the smallest free range that is large enough is taken first, and neighbours are joined.

    Attributes:
        size: bytes of the file so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []  # (offset, length), by offset
        self._given_back: deque[tuple[int, int]] = deque()

    def take(self, length: int) -> int:
        """Return the offset of a range of `length` bytes."""
        while self._given_back:
            self._join(*self._given_back.popleft())
        fitting = [(free, index) for index, (_, free) in enumerate(self._free) if free >= length]
        if not fitting:
            offset, self.size = self.size, self.size + length
            return offset
        free, index = min(fitting)
        offset, _ = self._free.pop(index)
        if free > length:
            self._free.insert(index, (offset + length, free - length))
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Take a range back; any thread may call this, also while `take` runs, as the garbage collector does."""
        self._given_back.append((offset, length))

    def _join(self, offset: int, length: int) -> None:
        """Add a range to the free ones, and join it with those that it touches."""
        index = bisect.bisect(self._free, (offset, length))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            length += before
            index -= 1
        self._free.insert(index, (offset, length))
