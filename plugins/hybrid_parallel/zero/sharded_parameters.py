"""ShardedParameters: parameters of which a rank keeps a shard, and the whole only while layers use them (ZeRO stage 3).

The whole is flat memory of which the parameters are views. It is given back by shrinking its storage to nothing, and
filled again in the same storage: views that autograd has saved stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, move_into, places_in_bucket
from plugins.hybrid_parallel.zero.bucket_parameter import hide_values, show_values
from plugins.hybrid_parallel.zero.comm.collectives import AllGatherHandle, ZeroCollectives
from plugins.hybrid_parallel.zero.comm.shard_gather import ShardUpdates, shard_gather


class ShardedParameters:
    """Parameters whose values ranks gather before use, and release after.

    Args:
        params: views of `flat`.
        flat: [ranks * shard], the present values.
        shard_index: this rank's position among those that share the values.
        exchange: their collectives.
        updates: keeps updates of the shards apart from gathers.

    Attributes:
        flat: the whole; of no size while it is released.
        shard: [shard], this rank's values.
        on_demand: called with the operation that reads released values; gathers them or refuses. None at first.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        flat: Tensor,
        shard_index: int,
        exchange: ZeroCollectives,
        updates: ShardUpdates,
    ) -> None:
        num_shards = dist.get_world_size(exchange.group)
        self.params, self.flat, self.updates = list(params), flat, updates
        self._bytes = flat.untyped_storage().nbytes()
        size = len(flat) // num_shards
        self._own = slice(shard_index * size, (shard_index + 1) * size)
        self.shard = exchange.empty_shard(size, flat.dtype, flat.device).copy_(flat[self._own])
        self._gather = shard_gather(exchange, self.shard)
        self._handle: AllGatherHandle | None = None
        self.is_gathered = True
        self.page_out()
        self.on_demand: Callable[[str], None] | None = None

    @property
    def gathers_ahead(self) -> bool:
        """Whether a gather that has started proceeds while this rank computes."""
        return self._gather.proceeds

    def start(self) -> None:
        """Start to gather the values."""
        if self.is_gathered or self._handle is not None:
            return
        self.updates.wait()
        self.flat.untyped_storage().resize_(self._bytes)
        with torch.no_grad():
            self._handle = self._gather.start(self.flat)

    def gather(self) -> None:
        """Wait until this rank has all values."""
        if self.is_gathered:
            return
        self.start()
        with torch.no_grad():
            self._handle.wait()
        self._handle, self.is_gathered = None, True
        self.page_out()
        for param in self.params:
            show_values(param)

    def read_ahead(self) -> None:
        """Start to bring this rank's shard near, if it is offloaded and is needed for the next gather."""
        if not self.is_gathered:
            self._gather.read_ahead()

    def page_out(self) -> None:
        """Let this rank's shard go until it is used again, if it is offloaded."""
        self._gather.page_out()

    def release(self) -> None:
        """Give the memory of the whole back; values that were changed in place are lost."""
        if self._handle is not None:
            self.gather()
        if self.is_gathered:
            if not self.flat.untyped_storage().resizable():
                self._move()
            self.is_gathered = False
            for param in self.params:
                hide_values(param, self)
            self.flat.untyped_storage().resize_(0)

    def _move(self) -> None:
        """Take other memory: code outside of torch, such as numpy, may still read this one."""
        self.flat = torch.empty_like(self.flat)
        for param in self.params:
            start = param.storage_offset()
            param.data = self.flat[start : start + param.numel()].view(param.shape)

    def dissolve(self) -> None:
        """Give the parameters whole values of their own."""
        self.gather()
        for param in self.params:
            param.data = param.data.clone()

    @torch.no_grad()
    def take_changed_values(self) -> None:
        """Take this rank's part of gathered values that were changed in place."""
        self.shard.copy_(self.flat[self._own])
        self.page_out()

    @staticmethod
    def of_frozen(params: Sequence[nn.Parameter], options: BucketOptions) -> ShardedParameters:
        """Shard parameters that are not trained."""
        offsets, size = places_in_bucket([param.numel() for param in params], options.num_shards, False)
        flat = torch.zeros(size, dtype=params[0].dtype, device=params[0].device)
        move_into(flat, params, offsets)
        return ShardedParameters(params, flat, options.shard_index, options.exchange, options.updates)

    def demand(self, operation: str) -> None:
        """Gather the values for an operation that reads them, or refuse it."""
        if self.on_demand is not None:
            self.on_demand(operation)
        self.gather()
