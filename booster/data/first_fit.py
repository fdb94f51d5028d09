"""First-fit packing: each document goes into the first row that has room for it."""

from __future__ import annotations

from collections.abc import Iterable


def first_fit(lengths: Iterable[int], room: int) -> list[list[int]]:
    """Put lengths into rows, each into the first row that has room.

    The number of rows is at most 1.7 times the least possible (Dósa, Sgall: First Fit bin packing: a tight analysis,
    2013), and close to it where most lengths are small. A tree of the rooms that are left finds the row in
    logarithmic time.

    Args:
        lengths: positive, and at most `room`.
        room: tokens of a row.

    Returns:
        For each row, indices of its lengths in their order.
    """
    rows: list[list[int]] = []
    left = _MostRoom(room)
    for index, length in enumerate(lengths):
        row = left.first_with(length)
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        left.take(row, length)
    return rows


class _MostRoom:
    """Binary tree over rows, whose inner nodes hold the most room that a row below them has; it grows as needed."""

    def __init__(self, room: int) -> None:
        self._room, self._num_leaves = room, 1
        self._most = [0, room]

    def first_with(self, length: int) -> int:
        """Return the first row that has room for `length`; a row that was not used yet has all of its room."""
        if self._most[1] < length:
            self._grow()
        node = 1
        while node < self._num_leaves:
            node = 2 * node if self._most[2 * node] >= length else 2 * node + 1
        return node - self._num_leaves

    def take(self, row: int, length: int) -> None:
        """Use `length` of the room of a row."""
        node = row + self._num_leaves
        self._most[node] -= length
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    def _grow(self) -> None:
        """Double the number of rows."""
        leaves = self._most[self._num_leaves :] + [self._room] * self._num_leaves
        self._num_leaves *= 2
        self._most = [0] * self._num_leaves + leaves
        for node in range(self._num_leaves - 1, 0, -1):
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
