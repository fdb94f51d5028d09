"""Units: the samples that every pass runs over, whatever the layout.

How a matrix product rounds may depend on its shape. A unit has a fixed number of samples, so that its products have the
same shapes on every rank of every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import split_batch
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.reproducible.unit_stream import UnitStream


class Units:
    """Cuts batches into units.

    Args:
        size: samples of a unit.
        mesh: the grid of ranks.
        stream: draws the random numbers of the units.
    """

    def __init__(self, size: int, mesh: HybridMesh, stream: UnitStream) -> None:
        self.size, self._mesh, self.stream = size, mesh, stream

    def begin(self, rows: int, step: int, replicas_wait: bool) -> int:
        """Begin a pass over a batch; all replicas call it, with their own `rows`.

        Args:
            rows: samples of this replica.
            step: number of optimizer steps so far.
            replicas_wait: whether replicas wait for one another in each pass.

        Returns:
            The number of passes of this replica; those after its own units are over placeholders.

        Raises:
            ConfigurationError: if the samples of a replica are no whole units; raised on all replicas.
        """
        everyone = self._rows_of_replicas(rows)
        for number in everyone:
            if number % self.size:
                raise ConfigurationError(
                    f"reproducible_unit={self.size} does not divide the {number} samples of a replica; use batches of "
                    "a multiple of it with drop_last=True, or reproducible_unit=1"
                )
        units = [number // self.size for number in everyone]
        rank = self._mesh.rank("dp")
        self.stream.begin_pass(step, sum(units[:rank]), sum(units))
        return max(units) if replicas_wait else units[rank]

    def cut(self, batch: Mapping[str, Any], rows: int, tokens: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return the units of a batch, in memory of their own: how a kernel rounds may depend on where it begins.

        Args:
            batch: its samples are whole units.
            rows: number of its samples.
            tokens: of images and sounds, see `media_tokens`.
        """
        units = split_batch(batch, rows // self.size, tokens=tokens, rows=rows) if rows else []
        return [{name: _copied(value) for name, value in unit.items()} for unit in units]

    def _rows_of_replicas(self, rows: int) -> Sequence[int]:
        if self._mesh.size("dp") == 1:
            return [rows]
        found = [torch.zeros((), dtype=torch.int64) for _ in range(self._mesh.size("dp"))]
        dist.all_gather(found, torch.tensor(rows), group=self._mesh.group("dp"))
        return [int(each) for each in found]


def _copied(value: Any) -> Any:
    is_values = isinstance(value, Tensor) and value.is_floating_point()
    return value.clone(memory_format=torch.contiguous_format) if is_values else value
