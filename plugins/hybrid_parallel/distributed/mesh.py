"""The grid of ranks: axes `pp`, `dp`, `cp`, `tp`, the last varying fastest; each rank's device, and its machine."""

from __future__ import annotations

import inspect
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from booster.errors import ConfigurationError
from booster.launch import machine_of_this_rank
from booster.logging import announce, get_logger
from plugins.hybrid_parallel.distributed.agreement import checked_collectives
from shardformer.distributed.blocks import compute_in_blocks
from shardformer.distributed.collectives import world_timeout
from shardformer.distributed.process_groups import ProcessGroups, all_gather_json, new_group
from shardformer.shard_spec import EXPERTS, TENSOR

AXES = ("pp", "dp", "cp", "tp")
# The ranks that hold the same parameters and see other tokens: other samples, or other parts of the same sequences.
DP_CP = "dp_cp"
# Its subgroups: neighbours that hold different experts, and ranks that hold the same experts.
EP, EXPERT_REPLICAS = "ep", "ep_replicas"


@dataclass(frozen=True)
class HybridMesh:
    """This rank's position in the grid, and its process groups."""

    device_mesh: DeviceMesh  # torch's mesh with the four axes
    device: torch.device
    stage_ranks: tuple[int, ...]  # global ranks of the pipeline that this rank is part of, first stage first
    replica_group: ProcessGroup  # all ranks with this tensor-parallel coordinate, over which a step's loss is summed
    # the groups of the axes; of `dp_cp`, which combines both axes; of `ep` and `ep_replicas`, which are its rows and
    # columns; and of `ep_tp`, which is `ep` with its tensor-parallel ranks
    axis_groups: Mapping[str, ProcessGroup]
    # the groups that `link_group` and `tied_group` create for this grid
    later_groups: ProcessGroups = field(default_factory=ProcessGroups, repr=False, compare=False)

    def group(self, axis: str) -> ProcessGroup:
        """Return the process group of an axis."""
        return self.axis_groups[axis]

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return dist.get_world_size(self.axis_groups[axis])

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return dist.get_rank(self.axis_groups[axis])

    @property
    def place(self) -> str:
        """Position of this rank, for messages: "rank 3 (stage 1, tp rank 1)"."""
        names = {"pp": "stage", "dp": "replica", "cp": "cp rank", "tp": "tp rank"}
        words = ", ".join(f"{name} {self.rank(axis)}" for axis, name in names.items() if self.size(axis) > 1)
        return f"rank {dist.get_rank()}" + (f" ({words})" if words else "")


def replicate_axis(axis: str) -> str:
    """Return the axis of ranks that hold the same shards of tensors sharded over `axis`, see `ShardSpec.axis`."""
    return EXPERT_REPLICAS if axis == EXPERTS else DP_CP


def build_mesh(
    pp_size: int,
    dp_size: int,
    cp_size: int,
    tp_size: int,
    debug: bool = False,
    placement: list[list[list[int]]] | None = None,
    ep_size: int = 1,
    device: torch.device | None = None,
) -> HybridMesh:
    """Return the grid of a layout, built at the first call; all ranks of the world must call this.

    Args:
        placement: the ranks as [dp][pp][tp]; None for default order.
        ep_size: number of neighbours on the `dp_cp` axis that share the experts; divides the size of that axis.
        device: the device of this rank; None for `current_device`.

    Raises:
        ConfigurationError: if this torch cannot create groups in the order of the placement, or two ranks use the same
            GPU.
    """
    grid = torch.arange(dist.get_world_size()).view(pp_size, dp_size, cp_size, tp_size)
    if placement is not None:
        grid = torch.tensor(placement).movedim(1, 0).unsqueeze(2)  # [pp, dp, 1, tp]
    key = ("mesh", debug, grid.shape, ep_size, tuple(grid.flatten().tolist()), device)
    with checked_collectives(debug):
        return ProcessGroups.of_world().get_or_create(key, lambda: _build(grid, ep_size, device or claim_device()))


def _build(grid: torch.Tensor, ep_size: int, device: torch.device) -> HybridMesh:
    tp_size = grid.shape[-1]
    # Groups of our own: torch's mesh would create groups with its own timeout instead of the job's.
    axis_groups = _groups_of_axes(grid)
    device_mesh = DeviceMesh.from_group(list(axis_groups.values()), device.type, mesh=grid, mesh_dim_names=AXES)
    axis_groups[DP_CP] = axis_groups["dp"]
    if device_mesh.size(AXES.index("cp")) > 1:
        axis_groups[DP_CP] = _own_group(grid.flatten(1, 2).movedim(1, -1).flatten(0, 1).tolist(), DP_CP)
    axis_groups |= _expert_groups(grid, ep_size, axis_groups)
    _, dp, cp, tp = device_mesh.get_coordinate()
    replicas = [device_mesh.mesh[..., index].flatten().tolist() for index in range(tp_size)]
    return HybridMesh(
        device_mesh=device_mesh,
        device=device,
        stage_ranks=tuple(device_mesh.mesh[:, dp, cp, tp].tolist()),
        replica_group=_own_group(replicas, "replicas"),
        axis_groups=axis_groups,
    )


def _expert_groups(
    grid: torch.Tensor, ep_size: int, axis_groups: Mapping[str, ProcessGroup]
) -> dict[str, ProcessGroup]:
    """Create the groups of expert parallelism; if every rank has all experts, reuse existing groups."""
    if ep_size == 1:
        alone = _group_of_one(grid, axis_groups)
        return {
            EP: _own_group([[rank] for rank in grid.flatten().tolist()], EP) if alone is None else alone,
            EXPERT_REPLICAS: axis_groups[DP_CP],
            EXPERTS: axis_groups[TENSOR],
        }
    blocks = grid.flatten(1, 2).unflatten(1, (-1, ep_size))  # [pp, ep_replicas, ep, tp]
    return {
        EP: _own_group(blocks.movedim(2, -1).flatten(0, 2).tolist(), EP),
        EXPERT_REPLICAS: _own_group(blocks.movedim(1, -1).flatten(0, 2).tolist(), EXPERT_REPLICAS),
        EXPERTS: _own_group(blocks.flatten(2).flatten(0, 1).tolist(), EXPERTS),
    }


def _groups_of_axes(grid: torch.Tensor) -> dict[str, ProcessGroup]:
    """Create the groups along each axis of the grid; return this rank's.

    All axes of size 1 share a group of this rank alone: creating groups of one rank for each takes as many agreements
    of the whole job as there are ranks.
    """
    groups: dict[str, ProcessGroup] = {}
    for position, (axis, size) in enumerate(zip(AXES, grid.shape, strict=True)):
        alone = _group_of_one(grid, groups) if size == 1 else None
        groups[axis] = alone or _own_group(grid.movedim(position, -1).reshape(-1, size).tolist(), axis)
    return groups


def _group_of_one(grid: torch.Tensor, groups: Mapping[str, ProcessGroup]) -> ProcessGroup | None:
    """Return the group of this rank alone, if one of these axes has it."""
    single = [axis for axis, size in zip(AXES, grid.shape, strict=True) if size == 1 and axis in groups]
    return groups[single[0]] if single else None


def control_group() -> ProcessGroup:
    """Return a CPU group of all ranks for agreement outside of training; all ranks must call it."""
    return ProcessGroups.of_world().get_or_create(
        "control", lambda: dist.new_group(backend="gloo", timeout=world_timeout())
    )


def pipelines_of(device_mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of every pipeline of the grid, first stage first."""
    return device_mesh.mesh.flatten(1).t().tolist()  # [pp, dp * cp * tp] -> one row per pipeline


def link_group(mesh: HybridMesh, *link: object) -> ProcessGroup:
    """Return the pipeline's group of one `link`, whose messages do not queue with others; all ranks call it."""
    return mesh.later_groups.get_or_create(("link", *link), lambda: _own_group(pipelines_of(mesh.device_mesh), "pp"))


def shard_groups(mesh: HybridMesh, axis: str, num_shards: int) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Return the ranks that share the states of parameters, and those that repeat this rank's share.

    All ranks of the world must call this.

    Args:
        axis: the axis of the ranks that hold the same parameters, see `replicate_axis`.
        num_shards: number of neighbours on that axis that share the states; divides its size.

    Returns:
        A group of `num_shards` ranks; a group with one rank of every such group, None if there is only one.
    """
    size = mesh.size(axis)
    if num_shards == size:
        return mesh.group(axis), None
    mine = [torch.zeros(size, dtype=torch.int64) for _ in range(dist.get_world_size())]
    ranks = torch.tensor(dist.get_process_group_ranks(mesh.group(axis)))
    dist.all_gather(mine, ranks, group=control_group())
    rows = sorted({tuple(row.tolist()) for row in mine})

    def build() -> tuple[ProcessGroup, ProcessGroup]:
        sharing = _own_group(
            [list(row[start : start + num_shards]) for row in rows for start in range(0, size, num_shards)], "shards"
        )
        repeating = [list(row[start::num_shards]) for row in rows for start in range(num_shards)]
        return sharing, _own_group(repeating, "repeated shards")

    return mesh.later_groups.get_or_create(("shards", axis, num_shards), build)


def stage_group(mesh: HybridMesh) -> ProcessGroup:
    """Return the group of this stage's tensor-parallel ranks of all replicas; all ranks must call it."""
    if mesh.size(DP_CP) == 1:
        return mesh.group("tp")
    if mesh.size("tp") == 1:
        return mesh.group(DP_CP)
    stages = mesh.device_mesh.mesh.flatten(1).tolist()
    return mesh.later_groups.get_or_create(("stage",), lambda: _own_group(stages, "stage"))


def block_group(mesh: HybridMesh, count: int, use: Callable[[Tensor], Tensor], sequence_count: int) -> ProcessGroup:
    """Return this rank's tensor-parallel group that computes in `count` blocks; all ranks call it."""

    def build() -> ProcessGroup:
        group = _own_group(mesh.device_mesh.mesh.flatten(0, 2).tolist(), "tp")
        compute_in_blocks(group, count, use, sequence_count)
        return group

    return mesh.later_groups.get_or_create(("blocks", count, sequence_count), build)


def tied_group(mesh: HybridMesh, stages: tuple[int, ...]) -> ProcessGroup | None:
    """Return this pipeline's ranks at `stages`, with one tied parameter; None elsewhere; all ranks call it."""
    pipelines = pipelines_of(mesh.device_mesh)
    others = [stage for stage in range(mesh.size("pp")) if stage not in stages]
    # The other stages get a group too: torch names locally synchronised groups (the copies of key/value heads) by the
    # number of groups that a rank is in, which therefore must not differ between ranks.
    parts = [part for part in (stages, others) if part]
    partition = [[ranks[stage] for stage in part] for part in parts for ranks in pipelines]
    group = mesh.later_groups.get_or_create(("tied", stages), lambda: _own_group(partition, "tied"))
    return group if mesh.rank("pp") in stages else None


def _own_group(partition: list[list[int]], name: str) -> ProcessGroup:
    """Create this rank's group of a partition of all ranks; all of them must call this.

    Groups have the numbers that torch would give them if each rank asked for each group, which it need not do: a job
    of 1,024 ranks has 2,476 of them, and with a bound device NCCL splits its communicator for each.

    Args:
        name: what the failure monitor calls it; the prefix tells that only training uses it.
    """
    numbers = dist.distributed_c10d._world
    first, rank = numbers.group_count, dist.get_rank()
    skipped = () if os.environ.get("TORCH_DIST_INIT_BARRIER") == "1" else partition  # all ranks wait for each group
    own = None
    for number, ranks in enumerate(partition, first):
        if rank in ranks or not skipped:
            numbers.group_count = number
            group = new_group(ranks, group_desc=f"mesh_{name}", **_in_order(ranks))
            own = group if rank in ranks else own
    numbers.group_count = first + len(partition)
    return own


def _in_order(ranks: list[int]) -> dict[str, bool]:
    """Return the arguments with which `new_group` keeps the order of the ranks."""
    if ranks == sorted(ranks):
        return {}
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ConfigurationError(
            f"device_mapping puts ranks in the order {ranks}, which torch {torch.__version__} sorts; "
            "use ascending ranks along every axis, or a newer torch"
        )
    return {"sort_ranks": False}


_logger = get_logger(__name__)


def announce_grid(grid: torch.Tensor) -> None:
    """Say on rank 0 which axes of `grid`, [pp, dp, cp, tp], cross machines, once; warn of `tp`; all ranks call it."""
    key = ("announced", grid.shape, tuple(grid.flatten().tolist()))
    ProcessGroups.of_world().get_or_create(key, lambda: _announce(grid, all_gather_json(machine_of_this_rank())))


def _announce(grid: torch.Tensor, machines: Sequence[str]) -> None:
    line, warning = line_of(grid, machines), warning_of(grid, machines)
    if len(set(machines)) == 1:
        _logger.info("%s", line)
    else:
        announce(_logger, line)
    if warning is not None and dist.get_rank() == 0:
        _logger.warning("%s", warning)


def line_of(grid: torch.Tensor, machines: Sequence[str]) -> str:
    """Describe the axes of `grid`, the ranks as [pp, dp, cp, tp], and which stay inside a machine."""
    used = [axis for axis, size in zip(AXES, grid.shape, strict=True) if size > 1]
    sizes = [f"{axis} {grid.shape[AXES.index(axis)]}" for axis in used]
    count = len(set(machines))
    line = f"mesh: {' x '.join(sizes) or 'one rank'} on {count} machine{'s' if count > 1 else ''}"
    across = [axis for axis in used if _first_crossing(grid, axis, machines)]
    inside = [axis for axis in used if axis not in across]
    parts = [_clause(inside, "stay", "inside a machine")] if count > 1 and inside else []
    parts += [_clause(across, "cross", "machines")] if across else []
    return "; ".join([line, ", ".join(parts)]) if parts else line


def warning_of(grid: torch.Tensor, machines: Sequence[str]) -> str | None:
    """Return a sentence if a tensor-parallel group of `grid`, [pp, dp, cp, tp], crosses `machines`; else None."""
    crossing = _first_crossing(grid, "tp", machines)
    if crossing is None:
        return None
    tp_size = grid.shape[-1]
    counts = Counter(machines).values()
    fits = math.gcd(tp_size, *counts)
    if fits == tp_size:
        cure = "let the ranks of each machine follow one another, as srun --distribution=block does"
    elif len(set(counts)) == 1:
        cure = f"a machine has {min(counts)} of the ranks, so use tp_size={fits}, and pp_size for the rest"
    else:
        cure = f"a machine has {min(counts)} to {max(counts)} ranks, so use tp_size={fits}, and pp_size for the rest"
    return (
        f"tp_size={tp_size} puts the tensor-parallel group of ranks {crossing[0]} to {crossing[-1]} on "
        f"{len({machines[rank] for rank in crossing})} machines, and every layer waits for the network between them; "
        f"{cure}"
    )


def _first_crossing(grid: torch.Tensor, axis: str, machines: Sequence[str]) -> list[int] | None:
    """Return the first group along an axis whose ranks are on several machines."""
    position = AXES.index(axis)
    groups = grid.movedim(position, -1).reshape(-1, grid.shape[position])
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    where = torch.tensor([numbers[machine] for machine in machines])[groups]
    crossing = (where != where[:, :1]).any(1).nonzero()
    return groups[crossing[0, 0]].tolist() if len(crossing) else None


def _clause(axes: Sequence[str], verb: str, where: str) -> str:
    """Return "pp and dp cross machines", for one axis "pp crosses machines"."""
    ending = "" if len(axes) > 1 else "es" if verb.endswith("s") else "s"
    names = axes[0] if len(axes) == 1 else f"{', '.join(axes[:-1])} and {axes[-1]}"
    return f"{names} {verb}{ending} {where}"


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
    """Return the ranks by replica and stage, the first as mapped, of the first ranks if there are others."""
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
    """Return this rank's GPU (of `init_process_group(device_id=...)`, else torch's current), or the CPU."""
    if not (torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())):
        return torch.device("cpu")
    bound = dist.group.WORLD.bound_device_id
    return torch.device("cuda", torch.cuda.current_device()) if bound is None else bound


def claim_device() -> torch.device:
    """Make `current_device` torch's and return it; all ranks call it; two ranks cannot have one GPU (NCCL)."""
    device = current_device()
    if device.type != "cuda":
        return device
    if device.index != torch.cuda.current_device():
        torch.cuda.set_device(device)  # streams and events are those of the current device
    identifier = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    check_own_device(all_gather_json(None if identifier is None else str(identifier)))
    return device


def check_own_device(identifiers: list[str | None]) -> None:
    """Check by UUIDs (None if unknown) that each rank has a GPU of its own; ConfigurationError if not."""
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
