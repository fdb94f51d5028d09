"""Random numbers that some groups of ranks share and others do not (ATorch's `MultiDimParallelRandomizer`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from shardformer.compat.atorch.parallel_groups import ParallelGroups, parallel_groups
from shardformer.distributed.random import SharedStream

State = dict[str, torch.Tensor]


class Randomizer(SharedStream):
    """One stream of random numbers, of the CPU and the current GPU."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from this stream, which goes on where it was left; torch's own is as before afterwards."""
        return self.active()


class MultiDimParallelRandomizer:
    """Streams by which groups of ranks are to draw the same.

    With groups g_0, g_1, ... of sizes s_i, in which this rank has the places r_i, and m_i the product of the sizes
    before s_i, the seed of a stream that some of them share is

        base_seed + code * (product of all sizes) + (sum of r_i * m_i over the groups that do not share it)

    where code has a bit for each group that does.

    Args:
        base_seed: of all streams.
        groups: the grid; None for what `create_parallel_group` made.
        rank: whose streams; None for this process's.

    Raises:
        RuntimeError: there is no grid.
    """

    def __init__(self, base_seed: int, groups: ParallelGroups | None = None, rank: int | None = None) -> None:
        groups = groups or parallel_groups()
        if groups is None:
            raise RuntimeError("there are no parallel groups; call create_parallel_group first")
        self.base_seed, self.groups = base_seed, groups
        self.places = groups.coordinates(dist.get_rank() if rank is None else rank)
        self._streams: dict[frozenset[str], Randomizer] = {}

    def seed(self, *same_groups: str) -> int:
        """Of the stream that these groups share.

        Raises:
            ValueError: a group that does not exist.
        """
        code, offset, step = 0, 0, 1
        unknown = set(same_groups) - set(self.groups.sizes)
        if unknown:
            raise ValueError(f"there is no parallel group '{min(unknown)}'; use one of {', '.join(self.groups.sizes)}")
        for bit, (name, size) in enumerate(self.groups.sizes.items()):
            if name in same_groups:
                code += 2**bit
            else:
                offset += self.places[name] * step
            step *= size
        return self.base_seed + code * math.prod(self.groups.sizes.values()) + offset

    def get_randomizer(self, *same_groups: str) -> Randomizer:
        """The stream that these groups share; the same object for the same groups."""
        key = frozenset(same_groups)
        if key not in self._streams:
            self._streams[key] = Randomizer(self.seed(*same_groups))
        return self._streams[key]

    def get_states(self) -> dict[str, State]:
        """Of all streams that were drawn from, by the names of the groups, joined by commas."""
        return {",".join(sorted(key)): stream.state_dict() for key, stream in self._streams.items()}

    def set_states(self, states: Mapping[str, State]) -> None:
        """Go on from these."""
        for names, state in states.items():
            self.get_randomizer(*filter(None, names.split(","))).load_state_dict(state)


_instance: MultiDimParallelRandomizer | None = None


def init_randomizer(base_seed: int = 1234) -> MultiDimParallelRandomizer:
    """Make the randomizer of this process, anew where there was one."""
    global _instance
    _instance = MultiDimParallelRandomizer(base_seed)
    return _instance


def get_randomizer(*same_groups: str) -> Randomizer:
    """A stream of this process's randomizer.

    Raises:
        RuntimeError: there is none.
    """
    if _instance is None:
        raise RuntimeError("there is no randomizer; call init_randomizer first")
    return _instance.get_randomizer(*same_groups)
