"""Random streams shared by chosen groups of ranks (ATorch's `MultiDimParallelRandomizer`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from shardformer.compat.atorch.parallel_groups import PROCESS_STATE, ParallelGroups, parallel_groups
from shardformer.distributed.random import SharedStream

State = dict[str, torch.Tensor]


class Randomizer(SharedStream):
    """A stream of random numbers, for the CPU and the current GPU."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from this stream, continuing where it stopped; torch's own random state is restored afterwards."""
        return self.active()


class MultiDimParallelRandomizer:
    """Random streams, one for each set of groups whose ranks must draw the same numbers.

    Let groups g_0, g_1, ... have sizes s_i, let r_i be this rank's position in g_i, and let m_i be the product of the
    sizes before s_i. The seed of a stream that some of the groups share is

        base_seed + code * (product of all sizes) + (sum of r_i * m_i over the groups that do not share it)

    where code has one bit set for each group that shares it.

    Args:
        base_seed: base of all seeds.
        groups: the mesh; None for the last result of `create_parallel_group`.
        rank: rank to make streams for; None for this process's rank.

    Raises:
        RuntimeError: there is no mesh.
    """

    def __init__(self, base_seed: int, groups: ParallelGroups | None = None, rank: int | None = None) -> None:
        groups = groups or parallel_groups()
        if groups is None:
            raise RuntimeError("there are no parallel groups; call create_parallel_group first")
        self.base_seed, self.groups = base_seed, groups
        self.places = groups.coordinates(dist.get_rank() if rank is None else rank)
        self._streams: dict[frozenset[str], Randomizer] = {}

    def seed(self, *same_groups: str) -> int:
        """Return the seed of the stream that these groups share.

        Raises:
            ValueError: a group does not exist.
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
        """Return the stream that these groups share; the same object for the same groups."""
        key = frozenset(same_groups)
        if key not in self._streams:
            self._streams[key] = Randomizer(self.seed(*same_groups))
        return self._streams[key]

    def get_states(self) -> dict[str, State]:
        """Return the states of all streams in use, keyed by their sorted group names joined by commas."""
        return {",".join(sorted(key)): stream.state_dict() for key, stream in self._streams.items()}

    def set_states(self, states: Mapping[str, State]) -> None:
        """Restore streams from `states`."""
        for names, state in states.items():
            self.get_randomizer(*filter(None, names.split(","))).load_state_dict(state)


def init_randomizer(base_seed: int = 1234) -> MultiDimParallelRandomizer:
    """Create the randomizer of this process, replacing an existing one."""
    PROCESS_STATE.randomizer = MultiDimParallelRandomizer(base_seed)
    return PROCESS_STATE.randomizer


def get_randomizer(*same_groups: str) -> Randomizer:
    """Return a stream of this process's randomizer.

    Raises:
        RuntimeError: there is no randomizer.
    """
    if PROCESS_STATE.randomizer is None:
        raise RuntimeError("there is no randomizer; call init_randomizer first")
    return PROCESS_STATE.randomizer.get_randomizer(*same_groups)
