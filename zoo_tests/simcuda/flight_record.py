"""Torch's flight recorder of NCCL, for the simulated one: the latest operations, and how far each has come."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zoo_tests.simcuda.work import Work

_KEPT = 2000


@dataclass(frozen=True)
class Operation:
    """One operation of a group.

    Attributes:
        name: of the operator.
        group: torch's name of the group.
        number: number of the operation in its group.
        collectives: number of collectives of the group up to it.
        is_transfer: whether it sends or receives, and is no collective.
        work: the operation itself.
        sizes, dtypes: of its tensors.
    """

    name: str
    group: str
    number: int
    collectives: int
    is_transfer: bool
    work: Work
    sizes: list[list[int]]
    dtypes: list[str]
    created_ns: int = field(default_factory=time.time_ns)

    def entry(self) -> dict[str, Any]:
        """The operation as torch writes it."""
        is_over = self.work.done.is_set()
        return {
            "profiling_name": f"nccl:{self.name.strip('_')}",
            "process_group": [self.group, ""],
            "op_id": self.number,
            "collective_seq_id": self.collectives,
            "is_p2p": self.is_transfer,
            "input_sizes": self.sizes,
            "input_dtypes": self.dtypes,
            "state": "completed" if is_over else "scheduled",
            "retired": is_over,
            "time_created_ns": self.created_ns,
        }


@dataclass
class Counter:
    """Operations and collectives of a group so far."""

    operations: int = 0
    collectives: int = 0

    def note(self, name: str, group: str, tensors: Sequence[Tensor], work: Work, is_transfer: bool = False) -> None:
        """Count an operation, and keep it for the dump."""
        self.operations, self.collectives = self.operations + 1, self.collectives + (not is_transfer)
        sizes = [list(tensor.shape) for tensor in tensors]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        numbers = self.operations, self.collectives
        _operations.append(Operation(name, group, *numbers, is_transfer, work, sizes, dtypes))


_operations: deque[Operation] = deque(maxlen=_KEPT)


def dump(include_collectives: bool = True, only_active: bool = False) -> bytes:
    """As `torch._C._distributed_c10d._dump_nccl_trace_json`."""
    kept = [each for each in list(_operations) if not (only_active and each.work.done.is_set())]
    return json.dumps({"version": "2.10", "entries": [each.entry() for each in kept]}).encode()
