"""ShardedParameters: parameters of which a rank keeps a shard, and the whole only while layers use them (ZeRO stage 3).

The whole is flat memory of which the parameters are views. It is given back by shrinking its storage to nothing, and
filled again in the same storage: views that autograd has saved stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, Source, places_in_bucket, take_source
from plugins.hybrid_parallel.zero.bucket_parameter import hide_values, show_values
from plugins.hybrid_parallel.zero.comm.collectives import AllGatherHandle
from plugins.hybrid_parallel.zero.comm.shard_gather import shard_gather


@dataclass(frozen=True)
class ParameterSlice:
    """The part of one parameter that is in a rank's shard.

    Attributes:
        start, stop: range in the flattened parameter; empty if there is none.
        place: range in the shard.
    """

    start: int
    stop: int
    place: slice


class ShardedParameters:
    """Parameters whose values ranks gather before use, and release after.

    The parameters become views of the whole, without values; who makes this fills `shard`.

    Args:
        params: the parameters.
        offsets: their places in the whole.
        size: elements of the whole.
        options: the options of their buckets: of the ranks that share the values.

    Attributes:
        flat: [ranks * shard], the whole; of no bytes while it is released.
        shard: [shard], this rank's values; zeros at first.
        rank: this rank's position among those that share the values.
        updates: keeps updates of the shards apart from gathers.
        on_demand: called with the operation that reads released values; gathers them or refuses. None at first.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], offsets: Sequence[int], size: int, options: BucketOptions
    ) -> None:
        dtype, device = params[0].dtype, params[0].device
        self.params, self.options = list(params), options
        self.updates, self.rank = options.updates, options.shard_index
        self.flat = torch.empty(size, dtype=dtype, device=device)
        self._bytes = size * dtype.itemsize
        for param, offset in zip(params, offsets, strict=True):
            param.data = self.flat[offset : offset + param.numel()].view(param.shape)
        self.flat.untyped_storage().resize_(0)
        self.shard = options.exchange.empty_shard(size // options.num_shards, dtype, device).zero_()
        self._gather = shard_gather(options.exchange, self.shard)
        self._handle: AllGatherHandle | None = None
        self.is_gathered = True  # until the first release
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
        self.shard.copy_(self.flat.view(-1, len(self.shard))[self.rank])
        self.page_out()

    def slice_on(self, rank: int, param: nn.Parameter) -> ParameterSlice:
        """Return which part of a parameter is in the shard of a rank among those that share the values."""
        size, offset = len(self.shard), param.storage_offset()
        start = max(0, rank * size - offset)
        stop = max(start, min(param.numel(), (rank + 1) * size - offset))
        first = offset + start - rank * size
        return ParameterSlice(start, stop, slice(first, first + stop - start))

    def own_slice(self, param: nn.Parameter) -> tuple[int, int, Tensor]:
        """Return start and stop of this rank's part of a flattened parameter, and its values, a view of the shard."""
        own = self.slice_on(self.rank, param)
        return own.start, own.stop, self.shard[own.place]

    @torch.no_grad()
    def fill(self, param: nn.Parameter, source: Source) -> None:
        """Copy this rank's part of the values of a parameter, which are not asked for if it has none."""
        start, stop, values = self.own_slice(param)
        if start < stop:
            values.copy_(source().reshape(-1)[start:stop])

    @staticmethod
    def of_frozen(
        params: Sequence[nn.Parameter], options: BucketOptions, initial: dict[nn.Parameter, Source]
    ) -> ShardedParameters:
        """Shard parameters that are not trained; the sources that are used are removed from `initial`."""
        sources = [take_source(param, initial) for param in params]
        offsets, size = places_in_bucket([param.numel() for param in params], options.num_shards, False)
        made = ShardedParameters(params, offsets, size, options)
        for param, source in zip(params, sources, strict=True):
            made.fill(param, source)
        made.page_out()
        return made

    def demand(self, operation: str) -> None:
        """Gather the values for an operation that reads them, or refuse it."""
        if self.on_demand is not None:
            self.on_demand(operation)
        self.gather()
