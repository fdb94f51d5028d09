"""ParameterExchange: moves cut parameters between the ranks that hold parts of them and one owner of each.

A part is a range of the flattened shard of one tensor-parallel or expert-parallel rank. Any distribution of parts is
allowed: ranks may hold different numbers of them, and several ranks may hold the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.distributed.agreement import all_gather_json
from shardformer.shard_spec import ShardSpec


@dataclass(frozen=True)
class HeldPart:
    """A part on one rank.

    Attributes:
        index: number of the parameter.
        place: which of the different shards it belongs to: copies of a shard have one place.
        start, stop: range in the flattened shard.
    """

    index: int
    place: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class ParameterExchange:
    """Exchanges parts of parameters in one collective for all of them.

    All ranks of the group must create it, with the same parameters, and call its methods in the same order.

    Args:
        group: the ranks that hold the parts.
        specs: how the parameters are sharded; the ranks of a spec need not be those of the group.
        owners: the owner of each parameter, a rank of the group.
        held: the parts on this rank, in the order in which values are passed.
        dtype, device: of the values.
    """

    def __init__(
        self,
        group: ProcessGroup,
        specs: Sequence[ShardSpec],
        owners: Sequence[int],
        held: Sequence[HeldPart],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.specs, self.owners, self.held = group, list(specs), list(owners), list(held)
        self.dtype, self.device = dtype, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        rows = all_gather_json([[part.index, part.place, part.start, part.stop] for part in held], group)
        self._parts = [[HeldPart(*part) for part in row] for row in rows]
        # Of several ranks with the same part, the first sends it; all of them receive it.
        seen: set[HeldPart] = set()
        self._sent: list[set[HeldPart]] = []
        for parts in self._parts:
            self._sent.append({part for part in parts if part not in seen})
            seen.update(parts)

    def agree(self, flags: Sequence[bool]) -> set[int]:
        """Return the parameters whose flag is set on any rank."""
        found = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        if self.world_size > 1:
            # On the CPU even if gradients are on a GPU: reading the result must not wait for the device.
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return set(found.nonzero().flatten().tolist())

    def to_owners(self, value_of: Callable[[int], Tensor], indices: Collection[int]) -> dict[int, Tensor]:
        """Send this rank's parts to their owners; return the whole parameters that this rank owns, by index.

        Args:
            value_of: returns the values of this rank's part at a position of `held`.
            indices: the parameters to send, the same on all ranks.
        """
        wanted = set(indices)

        def passes(sender: int, owner: int) -> Iterator[int]:
            """Yield positions of the parts of a rank that it sends to an owner."""
            for position, part in enumerate(self._parts[sender]):
                if part.index in wanted and self.owners[part.index] == owner and part in self._sent[sender]:
                    yield position

        sent = [[value_of(position) for position in passes(self.rank, owner)] for owner in range(self.world_size)]
        arriving = [[self._parts[rank][at] for at in passes(rank, self.rank)] for rank in range(self.world_size)]
        shards: dict[tuple[int, int], Tensor] = {}
        for part, values in self._exchange(sent, arriving):
            self._add(shards, part, values)
        return self._assemble(shards, [index for index in sorted(wanted) if self.owners[index] == self.rank])

    def from_owners(self, whole_of: Callable[[int], Tensor], keep: Callable[[int, Tensor], None]) -> None:
        """Send the whole parameters that this rank owns to the ranks that hold parts of them.

        Args:
            whole_of: returns a whole parameter by index.
            keep: receives the position in `held` and the new values, flat.
        """
        shards: dict[tuple[int, int], Tensor] = {}

        def cut(part: HeldPart) -> Tensor:
            key = part.index, part.place
            if key not in shards:
                shards[key] = self._spec_at(part).shard(whole_of(part.index)).reshape(-1)
            return shards[key][part.start : part.stop]

        sent = [[cut(part) for part in parts if self.owners[part.index] == self.rank] for parts in self._parts]
        mine = list(enumerate(self._parts[self.rank]))
        arriving = [[each for each in mine if self.owners[each[1].index] == owner] for owner in range(self.world_size)]
        found = self._exchange(sent, [[part for _, part in parts] for parts in arriving])
        positions = [position for parts in arriving for position, _ in parts]
        for position, (_, values) in zip(positions, found, strict=True):
            keep(position, values)

    # ----- helpers -----

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], arriving: Sequence[Sequence[HeldPart]]
    ) -> Iterator[tuple[HeldPart, Tensor]]:
        """Send a list of tensors to each rank; yield the parts that arrive from each, with their values, flat."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = [torch.cat([empty, *(each.reshape(-1) for each in parts)]) for parts in sent]
        sizes = [sum(part.size for part in parts) for parts in arriving]
        if self.world_size == 1:
            received = flat[0]
        else:
            received = empty.new_empty(sum(sizes))
            dist.all_to_all_single(received, torch.cat(flat), sizes, [len(each) for each in flat], group=self.group)
        parts = [part for each in arriving for part in each]
        yield from zip(parts, received.split([part.size for part in parts]) if parts else (), strict=True)

    def _add(self, shards: dict[tuple[int, int], Tensor], part: HeldPart, values: Tensor) -> None:
        """Add a part to the flat shard that it belongs to."""
        size = self._size_at(part)
        if part.size == size:
            shards[part.index, part.place] = values
            return
        shard = shards.setdefault((part.index, part.place), values.new_empty(size))
        shard[part.start : part.stop] = values

    def _assemble(self, shards: dict[tuple[int, int], Tensor], indices: Sequence[int]) -> dict[int, Tensor]:
        """Return whole parameters, in the order of the unsharded model and without padding."""
        found = {
            index: torch.empty(self.specs[index].full_shape, dtype=self.dtype, device=self.device) for index in indices
        }
        for (index, place), shard in shards.items():
            spec = self.specs[index].on_rank(place * self.specs[index].copies)
            spec.fill(found[index], shard.view(spec.local_shape))
        return found

    def _spec_at(self, part: HeldPart) -> ShardSpec:
        spec = self.specs[part.index]
        return spec.on_rank(part.place * spec.copies)

    def _size_at(self, part: HeldPart) -> int:
        return torch.Size(self._spec_at(part).local_shape).numel()
