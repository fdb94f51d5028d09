"""The device of this rank, and the placement of shards on ranks that the user gives by device names."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from booster.logging import get_logger
from shardformer.distributed.process_groups import all_gather_json

_logger = get_logger(__name__)
# `cuda:3`, `cpu:2`, `node-1/cuda:3`; also TensorFlow's `/device:XLA_DTU:3`.
_NAME = re.compile(r"^(?:(?P<host>[^/:\s]+)/)?(?:/device:)?(?P<kind>[A-Za-z_]\w*):(?P<index>\d+)$")
_EXAMPLE = "'cuda:3', 'cpu:2', 'host/cuda:3' or a rank such as 3"


@dataclass(frozen=True)
class MappedDevice:
    """A parsed device name."""

    index: int  # the device's number on its host, or a rank if `kind` is None
    kind: str | None = None  # "cuda", "cpu" or another
    host: str | None = None  # the host's name; None if there is only one host

    @staticmethod
    def of(name: Any) -> MappedDevice | None:
        """Parse a device name; return None if it is not one."""
        if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
            return MappedDevice(name)
        if not isinstance(name, str):
            return None
        if name.isdecimal():
            return MappedDevice(int(name))
        found = _NAME.match(name)
        return None if found is None else MappedDevice(int(found["index"]), found["kind"].lower(), found["host"])


def check_mapping(mapping: Mapping[Any, Any], num_stages: int, num_shards: int) -> list[str]:
    """Return the problems of a `device_mapping` as sentences; an empty list if there are none."""
    problems = _compare_keys("device_mapping", mapping, "stage", num_stages, "stage_cnt (pp_size)")
    devices: list[MappedDevice] = []
    for stage, shards in mapping.items():
        if not isinstance(shards, Mapping):
            problems.append(f"device_mapping[{stage!r}]={shards!r} is no mapping; use {{'shard_0': 'cuda:0'}}")
            continue
        problems += _compare_keys(f"device_mapping[{stage!r}]", shards, "shard", num_shards, "sharding_size (tp_size)")
        for shard, name in shards.items():
            device = MappedDevice.of(name)
            if device is None:
                problems.append(f"device_mapping[{stage!r}][{shard!r}]={name!r} is no device; use {_EXAMPLE}")
            elif device in devices:
                problems.append(f"device_mapping names {name!r} twice; give every shard a device of its own")
            else:
                devices.append(device)
    return problems


def ranks_of(mapping: Mapping[str, Mapping[str, Any]]) -> list[list[int]]:
    """Return the ranks of the shards, stage by stage; all ranks of the world must call this."""
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    places = [tuple(place) for place in all_gather_json([socket.gethostname(), local_rank])]
    stages = [mapping[f"stage_{stage}"] for stage in range(len(mapping))]
    ranks = [[_rank_of(shards[f"shard_{shard}"], places) for shard in range(len(shards))] for shards in stages]
    twice = [rank for rank, count in Counter(rank for row in ranks for rank in row).items() if count > 1]
    if twice:
        raise ConfigurationError(
            f"device_mapping means rank {twice[0]} by two names; give every shard a device of its own"
        )
    names_gpus = any(MappedDevice.of(name).kind == "cuda" for shards in stages for name in shards.values())
    if names_gpus and "nccl" not in str(dist.get_backend_config()):
        _logger.warning("device_mapping names GPUs, and ranks train on the CPU: numbers are taken as those of ranks")
    return ranks


def in_blocks(ranks: Sequence[Sequence[int]], world_size: int) -> list[list[list[int]]]:
    """Return the ranks by replica and stage: the first replica as mapped, the others in the same order after it.

    Raises:
        ConfigurationError: if there are further replicas, and the first does not consist of the first ranks.
    """
    block = sum(map(len, ranks))
    named = sorted(rank for row in ranks for rank in row)
    if world_size != block and named != list(range(block)):
        raise ConfigurationError(
            f"device_mapping places {block} of {world_size} ranks, {named}; with further replicas it has to place the "
            f"ranks 0 to {block - 1}, which the others follow"
        )
    return [[[rank + first for rank in row] for row in ranks] for first in range(0, world_size, block)]


def _compare_keys(where: str, mapping: Mapping[str, Any], word: str, count: int, size: str) -> list[str]:
    expected = [f"{word}_{number}" for number in range(count)]
    missing = [key for key in expected if key not in mapping]
    unknown = [key for key in mapping if key not in expected]
    problems = []
    if missing:
        problems.append(f"{where} has no {missing[0]}; {size}={count} needs {expected[0]} to {expected[-1]}")
    if unknown:
        problems.append(f"{where} has a {unknown[0]}; {size}={count} needs {expected[0]} to {expected[-1]}")
    return problems


def _rank_of(name: Any, places: Sequence[tuple[str, int]]) -> int:
    device = MappedDevice.of(name)
    if device.kind is None:
        if device.index >= len(places):
            raise ConfigurationError(
                f"device_mapping names rank {device.index} of {len(places)} ranks; use 0 to {len(places) - 1}"
            )
        return device.index
    hosts = {host for host, _ in places}
    if device.host is None and len(hosts) > 1:
        raise ConfigurationError(
            f"device_mapping names '{name}', which each of {len(hosts)} hosts may have; use '{sorted(hosts)[0]}/{name}'"
        )
    if device.host is not None and device.host not in hosts:
        raise ConfigurationError(f"device_mapping names the host '{device.host}'; use one of {sorted(hosts)}")
    wanted = (device.host or next(iter(hosts)), device.index)
    if wanted not in places:
        there = sorted(index for host, index in places if host == wanted[0])
        raise ConfigurationError(
            f"device_mapping names '{name}', where no rank runs; use the numbers {there[0]} to {there[-1]}"
        )
    return places.index(wanted)


def current_device() -> torch.device:
    """Return the device that this rank trains on: its GPU if there is one, otherwise the CPU.

    The GPU is the one that the default process group is bound to (`init_process_group(device_id=...)`); without that
    it is torch's current one.
    """
    if not (torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())):
        return torch.device("cpu")
    bound = dist.group.WORLD.bound_device_id
    return torch.device("cuda", torch.cuda.current_device()) if bound is None else bound


def claim_device() -> torch.device:
    """Make `current_device` torch's current one and return it; all ranks of the world must call this.

    Raises:
        ConfigurationError: two ranks train on the same GPU, for which NCCL has no communicator; raised on all ranks.
    """
    device = current_device()
    if device.type != "cuda":
        return device
    if device.index != torch.cuda.current_device():
        torch.cuda.set_device(device)  # streams and events are those of the current device
    identifier = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    check_own_device(all_gather_json(None if identifier is None else str(identifier)))
    return device


def check_own_device(identifiers: list[str | None]) -> None:
    """Check that each rank has a GPU of its own.

    Args:
        identifiers: UUID of each rank's GPU; None if unknown.

    Raises:
        ConfigurationError: two ranks have the same one.
    """
    first: dict[str, int] = {}
    for rank, identifier in enumerate(identifiers):
        if identifier is None:
            continue
        if identifier in first:
            raise ConfigurationError(
                f"ranks {first[identifier]} and {rank} use the same GPU ({identifier}), and NCCL needs one for each "
                "rank; start one rank per GPU, and call launch_from_torch or torch.cuda.set_device(LOCAL_RANK) first"
            )
        first[identifier] = rank
