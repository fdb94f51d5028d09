"""Named process groups and random streams, with the interface of ATorch.

`create_parallel_group(([("tensor", 2), ("data", 2), ("pipeline", 2)], None))`: as there, the first name varies fastest.
`MultiDimParallelRandomizer` draws from streams that chosen groups of ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardformer.distributed.process_groups import new_group
from shardformer.distributed.random import SharedStream

NAMES = ("tensor", "data", "pipeline", "sequence", "expert", "zero")
_ALIASES = {"pipe": "pipeline"}


@dataclass(frozen=True)
class ParallelGroups:
    """A mesh of ranks with named axes."""

    sizes: dict[str, int]  # name -> number of ranks along the axis, fastest varying first
    order: tuple[int, ...]  # rank at each position of the mesh

    @staticmethod
    def of(axes: Sequence[tuple[str, int]], order: Sequence[int] | None, world_size: int) -> ParallelGroups:
        """Return a mesh of all ranks by names, sizes and order; raises ValueError if they do not make one."""
        sizes: dict[str, int] = {}
        for name, size in axes:
            name = _ALIASES.get(name, name)
            if name not in NAMES or name in sizes:
                problem = "there twice" if name in sizes else "not known"
                raise ValueError(
                    f"the parallel group '{name}' is {problem}; use each of {', '.join(NAMES)} once at most"
                )
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"the parallel group '{name}' of size {size!r} has no ranks; use a size of 1 or more")
            sizes[name] = size
        if math.prod(sizes.values()) != world_size:
            raise ValueError(
                f"parallel groups of sizes {sizes} make {math.prod(sizes.values())} ranks of {world_size}; "
                "use sizes whose product is the world size"
            )
        order = tuple(range(world_size)) if order is None else tuple(order)
        if sorted(order) != list(range(world_size)):
            raise ValueError(
                f"the order of ranks {list(order)} is no permutation of 0 to {world_size - 1}; use one, or None"
            )
        return ParallelGroups(sizes, order)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's position along each named axis."""
        place, found = self.order.index(rank), {}
        for name, size in self.sizes.items():
            place, found[name] = divmod(place, size)
        return found

    def ranks(self, name: str) -> list[list[int]]:
        """Return the ranks of each group of that name."""
        grid = torch.tensor(self.order).view(*reversed(self.sizes.values()))
        dim = len(self.sizes) - 1 - list(self.sizes).index(name)
        return grid.movedim(dim, -1).reshape(-1, self.sizes[name]).tolist()


class _ProcessState:
    """What ATorch's functions share with each other: they take no object, like torch's default process group.

    Attributes:
        groups: result of the last `create_parallel_group`; None if there is none.
        process_groups: name -> this rank's process group.
        randomizer: the `MultiDimParallelRandomizer` of the last `init_randomizer`; None if there is none.
    """

    def __init__(self) -> None:
        self.groups: ParallelGroups | None = None
        self.process_groups: dict[str, ProcessGroup] = {}
        self.randomizer: Any = None


PROCESS_STATE = _ProcessState()


def create_parallel_group(
    parallel_config: tuple[Sequence[tuple[str, int]], Sequence[int] | None],
) -> ParallelGroups:
    """Create a process group for each axis; all ranks must call this with the same arguments, before boosting a model.

    Args:
        parallel_config: (name, size) of each axis, fastest varying first, and the order of ranks or None.

    Raises:
        ValueError: the arguments do not make a mesh of all ranks.
    """
    axes, order = parallel_config
    groups = ParallelGroups.of(axes, order, dist.get_world_size())
    PROCESS_STATE.process_groups.clear()
    for name in groups.sizes:
        for ranks in groups.ranks(name):
            group = new_group(ranks)
            if dist.get_rank() in ranks:
                PROCESS_STATE.process_groups[name] = group
    PROCESS_STATE.groups = groups
    return groups


def destroy_parallel_group() -> None:
    """Forget the groups."""
    PROCESS_STATE.groups = None
    PROCESS_STATE.process_groups.clear()


def parallel_groups() -> ParallelGroups | None:
    """Return the result of the last `create_parallel_group`; None if there is none."""
    return PROCESS_STATE.groups


def parallel_group(name: str) -> ProcessGroup | None:
    """Return this rank's process group of that name; None if there is none."""
    return PROCESS_STATE.process_groups.get(_ALIASES.get(name, name))


def parallel_rank(name: str) -> int:
    """Return this rank's position in its group of that name; 0 if there is no such group."""
    groups = PROCESS_STATE.groups
    return 0 if groups is None else groups.coordinates(dist.get_rank()).get(_ALIASES.get(name, name), 0)


def parallel_group_size(name: str) -> int:
    """Return the size of a group of that name; 1 if there is no such group."""
    return 1 if PROCESS_STATE.groups is None else PROCESS_STATE.groups.sizes.get(_ALIASES.get(name, name), 1)


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
        """Return the seed of the stream that these groups share; raises ValueError if a group does not exist."""
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
    """Return a stream of this process's randomizer; raises RuntimeError if there is no randomizer."""
    if PROCESS_STATE.randomizer is None:
        raise RuntimeError("there is no randomizer; call init_randomizer first")
    return PROCESS_STATE.randomizer.get_randomizer(*same_groups)
