"""What the loaders of one plugin share: the numbers that orders are drawn from, and a look at the first batches."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from plugins.hybrid_parallel.data.batch_check import ReplicaCheck
from plugins.hybrid_parallel.data.random_stream import LoadingStream
from plugins.hybrid_parallel.distributed.agreement import broadcast_json
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, control_group

if TYPE_CHECKING:
    from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader


class Loading:
    """The data side of a plugin.

    Args:
        mesh: the grid of ranks.
        seed: of the order of samples; None for the random numbers that rank 0 has when it boosts its first loader, from
            which a plain loader would draw.

    Attributes:
        first_batches: compares them.
    """

    def __init__(self, mesh: HybridMesh, seed: int | None) -> None:
        self.mesh, self.seed = mesh, seed
        self.loaders: list[ShardedDataLoader] = []
        self.first_batches = ReplicaCheck(mesh, self.loaders)

    @cached_property
    def order(self) -> LoadingStream:
        """What the order of samples is drawn from where the user gave no generator, alike on all ranks."""
        if self.seed is not None:
            return LoadingStream.seeded(self.seed)
        order = LoadingStream()
        order.load_state_dict(broadcast_json(order.state_dict(), control_group()))
        return order

    def shard(self, dataloader: DataLoader) -> ShardedDataLoader:
        """A loader of this rank's shares; called on all ranks alike.

        Raises:
            ConfigurationError: it cannot be shared out, or ranks have other data.
        """
        # Here, because of accelerate.
        from plugins.hybrid_parallel.data.dataloader import shard_dataloader_alike

        sharded = shard_dataloader_alike(dataloader, self.mesh, self.order)
        if all(sharded is not known for known in self.loaders):
            self.loaders.append(sharded)
        return sharded
