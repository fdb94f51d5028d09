"""The grid of ranks: axes `pp`, `dp`, `cp`, `tp`, the last varying fastest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class HybridMesh:
    """This rank's place in the grid, and the groups it talks in.

    Attributes:
        device_mesh: torch's mesh with the four axes.
        device: the device of this rank.
        stage_ranks: global ranks of the pipeline that this rank is part of, first stage first.
        forward_group, backward_group: the pipeline's ranks once for each direction: activations and gradients
            between two neighbours must not queue behind one another.
        replica_group: all ranks with this tensor-parallel coordinate, over which a step's loss is summed.
    """

    device_mesh: DeviceMesh
    device: torch.device
    stage_ranks: tuple[int, ...]
    forward_group: ProcessGroup
    backward_group: ProcessGroup
    replica_group: ProcessGroup

    def group(self, axis: str) -> ProcessGroup:
        """The process group of an axis."""
        return self.device_mesh.get_group(axis)

    def size(self, axis: str) -> int:
        return self.device_mesh.size(AXES.index(axis))

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.device_mesh.get_local_rank(axis)


# One grid a layout and world: process groups are costly and are never given back.
_MESHES: dict[tuple, HybridMesh] = {}
_TIED_GROUPS: dict[tuple, ProcessGroup | None] = {}


def build_mesh(pp_size: int, dp_size: int, cp_size: int, tp_size: int) -> HybridMesh:
    """The grid of a layout; all ranks of the world call this alike."""
    key = (id(dist.group.WORLD), pp_size, dp_size, cp_size, tp_size)
    if key not in _MESHES:
        _MESHES[key] = _build(pp_size, dp_size, cp_size, tp_size)
    return _MESHES[key]


def _build(pp_size: int, dp_size: int, cp_size: int, tp_size: int) -> HybridMesh:
    device = current_device()
    device_mesh = init_device_mesh(device.type, (pp_size, dp_size, cp_size, tp_size), mesh_dim_names=AXES)
    _, dp, cp, tp = device_mesh.get_coordinate()
    pipelines = pipelines_of(device_mesh)
    replicas = [sorted(device_mesh.mesh[..., index].flatten().tolist()) for index in range(tp_size)]
    return HybridMesh(
        device_mesh=device_mesh,
        device=device,
        stage_ranks=tuple(device_mesh.mesh[:, dp, cp, tp].tolist()),
        forward_group=_own_group(pipelines),
        backward_group=_own_group(pipelines),
        replica_group=_own_group(replicas),
    )


def pipelines_of(device_mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of every pipeline of the grid, first stage first."""
    return device_mesh.mesh.flatten(1).t().tolist()  # [pp, dp * cp * tp] -> one row a pipeline


def tied_group(mesh: HybridMesh, stages: tuple[int, ...]) -> ProcessGroup | None:
    """The ranks of this pipeline's `stages`, which hold the same tied parameter; None on other stages.

    All ranks of the world call this alike.
    """
    key = (id(mesh.device_mesh), stages)
    if key not in _TIED_GROUPS:
        pipelines = pipelines_of(mesh.device_mesh)
        others = [stage for stage in range(mesh.size("pp")) if stage not in stages]
        # The other stages get a group too: torch names locally synchronised groups (the copies of key/value heads)
        # after the number of groups that a rank is in, which therefore must not differ between ranks.
        parts = [part for part in (stages, others) if part]
        _TIED_GROUPS[key] = _own_group([[ranks[stage] for stage in part] for part in parts for ranks in pipelines])
    return _TIED_GROUPS[key] if mesh.rank("pp") in stages else None


def _own_group(partition: list[list[int]]) -> ProcessGroup | None:
    """Make a group of each list of ranks; every rank makes all of them, in order, and keeps the one it is in."""
    own = None
    for ranks in partition:
        group = dist.new_group(ranks)
        own = group if dist.get_rank() in ranks else own
    return own


def current_device() -> torch.device:
    """The device that this rank trains on: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
