"""What the operations of c10d write and read, for tests that stand between torch and a process group."""

from __future__ import annotations

# Operation -> places of what it writes and of what it reads among its arguments.
PLACES: dict[str, tuple[int | None, int]] = {
    "allreduce_": (0, 0),
    "broadcast_": (0, 0),
    "reduce_": (0, 0),
    "allgather_": (0, 1),
    "_allgather_base_": (0, 1),
    "reduce_scatter_": (0, 1),
    "_reduce_scatter_base_": (0, 1),
    "alltoall_": (0, 1),
    "alltoall_base_": (0, 1),
    "gather_": (0, 1),
    "scatter_": (0, 1),
    "barrier": (None, 0),
}
