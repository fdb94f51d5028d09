"""Process groups, created once and used again, since communicators are costly; and plain values sent over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import world_timeout

Created = TypeVar("Created")
LOCAL = "local"  # first element of the keys of groups with `use_local_synchronization`, which their ranks alone create


class ProcessGroups:
    """Process groups, and objects made of them, by key; each is created at its first use."""

    def __init__(self) -> None:
        self._created: dict[Hashable, Any] = {}

    @staticmethod
    def of_world() -> ProcessGroups:
        """Return the groups that belong to torch's default process group, which all boosts of a process share.

        They are looked up, not passed in: two boosts have nothing in common but the default process group. They are
        released with it, so a process that destroys it and joins another job gets new groups.
        """
        return _OF_WORLD.setdefault(dist.group.WORLD, ProcessGroups())

    @staticmethod
    def forget() -> None:
        """Release the groups of the default process group, whose meshes refer to it; before it is destroyed."""
        _OF_WORLD.pop(dist.group.WORLD, None)

    def get_or_create(self, key: Hashable, create: Callable[[], Created]) -> Created:
        """Return the entry of `key`, or store and return `create()`; all its ranks ask in one order."""
        if key not in self._created:
            self._created[key] = create()
        return self._created[key]

    def clear(self) -> None:
        """Remove the entries whose groups were destroyed while the default process group was kept.

        Those of `LOCAL` groups stay: torch names the next one like the destroyed one, and its ranks may read stale
        addresses in the store.
        """
        self._created = {key: made for key, made in self._created.items() if isinstance(key, tuple) and key[0] == LOCAL}


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> ProcessGroup:
    """Create a group, for CPU tensors too, with the job's timeout; `ranks`: members; None for all."""
    world = dist.group.WORLD
    bound = world.bound_device_id
    if options.get("use_local_synchronization"):
        # With a bound device NCCL splits the communicator of the default group, and all of its ranks have to take part.
        world.bound_device_id = None
    try:
        return dist.new_group(ranks, timeout=world_timeout(), backend=_backend(), **options)
    finally:
        world.bound_device_id = bound


def world_group() -> ProcessGroup:
    """Return a group of all ranks that takes CPU tensors; all ranks must call this.

    This is the default group, unless that was created for GPU tensors only, as by `init_process_group("nccl")`.
    """
    if _backend() is None:
        return dist.group.WORLD
    return ProcessGroups.of_world().get_or_create("world", new_group)


def message_group(group: ProcessGroup) -> ProcessGroup:
    """Return a group of the same ranks for point-to-point messages; all ranks of `group` must call this.

    It is `group` itself, unless that compares collectives (`debug=True`). torch counts messages among these, so that
    ranks which have sent another number of them would seem to be out of step in the next collective.
    """
    if not any(isinstance(group._get_backend(each), _ProcessGroupWrapper) for each in group._device_types):
        return group
    ranks = dist.get_process_group_ranks(group)
    return ProcessGroups.of_world().get_or_create((LOCAL, "messages", *ranks), lambda: _unchecked_group(ranks))


def _unchecked_group(ranks: Sequence[int]) -> ProcessGroup:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        return new_group(ranks, use_local_synchronization=True)
    finally:
        dist.set_debug_level(level)


def _backend() -> str | None:
    """Return the backends of new groups: those of the default group (None), or gloo for CPU tensors besides them."""
    if torch.device("cpu") in dist.group.WORLD._device_types:
        return None
    return f"cpu:gloo,{dist.get_backend_config()}"


# Weak keys: torch holds the default process group until `destroy_process_group`.
_OF_WORLD: WeakKeyDictionary[ProcessGroup, ProcessGroups] = WeakKeyDictionary()


# ----- plain values, which travel as JSON, never as pickle -----


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's value, in rank order; `group` is None for all ranks."""
    group = group or world_group()
    payload = json.dumps(value).encode()
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return [json.loads(payload)]
    lengths = [torch.zeros((), dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor(len(payload)), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffers = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(buffers, padded, group=group)
    return [
        json.loads(buffer[: int(length)].numpy().tobytes()) for buffer, length in zip(buffers, lengths, strict=True)
    ]


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's value, in rank order, on the group's first rank; return an empty list on the others."""
    group = group or world_group()
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = all_gather_json(len(payload), group)
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(payload)] = payload
    buffers = [torch.empty_like(padded) for _ in lengths] if dist.get_rank(group) == 0 else None
    dist.gather(padded, buffers, group=group, group_dst=0)
    return [
        json.loads(buffer[:length].numpy().tobytes()) for buffer, length in zip(buffers or [], lengths, strict=False)
    ]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None, source: int = 0) -> Any:
    """Broadcast the value of `source`, a global rank, and return it."""
    group = group or world_group()
    is_source = dist.get_rank() == source
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor(len(payload) if is_source else 0)
    dist.broadcast(length, source, group=group)
    payload = payload if is_source else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(payload, source, group=group)
    return json.loads(payload.numpy().tobytes())
