"""State shared by the loaders of one plugin: the random stream of sample orders, and the check of the first batches."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader, IterableDataset

from booster.logging import get_logger
from plugins.hybrid_parallel.data.checks import ReplicaCheck
from plugins.hybrid_parallel.data.random_stream import LoadingStream, OrderStream
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, control_group
from shardformer.distributed.process_groups import broadcast_json
from shardformer.utils.typed_json import from_json, to_json

if TYPE_CHECKING:
    from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader

_log = get_logger(__name__)


class Loading:
    """Data loading of a plugin.

    Args:
        seed: seed of the sample order; None to use rank 0's default random states when it boosts a loader, which a
            plain loader would also draw from.
    """

    def __init__(self, mesh: HybridMesh, seed: int | None) -> None:
        self.mesh, self.seed = mesh, seed
        self.first_batches = ReplicaCheck(mesh)

    @cached_property
    def order(self) -> OrderStream:
        """Random stream of the sample order for loaders without a generator of the user, the same on all ranks."""
        return OrderStream() if self.seed is None else OrderStream.seeded(self.seed)

    def _follow_default(self) -> None:
        """Let the order continue from rank 0's default random states if the script has drawn from them."""
        if self.seed is None:
            state = None if self.order.is_current else LoadingStream().state_dict()
            state = broadcast_json(state and to_json(state, "the random state"), control_group())
            if state is not None:
                self.order.load_state_dict(from_json(state))

    def shard(self, dataloader: DataLoader) -> ShardedDataLoader:
        """Return a loader of this rank's share; all ranks call it; refuses one that cannot be sharded or differs."""
        # Imported here to defer the import of accelerate.
        from plugins.hybrid_parallel.data.dataloader import shard_dataloader_on_all_ranks

        self._follow_default()
        if not isinstance(dataloader.dataset, IterableDataset) and not len(dataloader):
            _log.warning(
                "the DataLoader has no batches: %d samples, batch_size=%s, drop_last=%s",
                len(dataloader.dataset),
                dataloader.batch_size,
                dataloader.drop_last,
            )
        sharded = shard_dataloader_on_all_ranks(dataloader, self.mesh, self.order)
        sharded.on_iteration = self.first_batches.count_iteration
        return sharded
