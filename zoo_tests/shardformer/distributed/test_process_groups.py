"""Process groups are created once, and end with the default process group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from plugins.hybrid_parallel.distributed.mesh import build_mesh, control_group, link_group, stage_group, tied_group
from shardformer.distributed.process_groups import ProcessGroups, new_group, world_group


def join() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())


def number_of_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_are_created_once() -> None:
    join()
    try:
        mesh = build_mesh(2, 2, 1, 1)
        groups = link_group(mesh, "activations", 0), tied_group(mesh, (0, 1))
        before = number_of_groups()
        assert build_mesh(2, 2, 1, 1) is mesh
        assert mesh.group("cp") is mesh.group("tp"), "one group of this rank alone is enough"
        assert (link_group(mesh, "activations", 0), tied_group(mesh, (0, 1))) == groups
        assert number_of_groups() == before
        assert build_mesh(2, 1, 1, 2) is not mesh
        assert link_group(mesh, "gradients", 0) not in groups
        assert tied_group(mesh, (1,)) is None, "this rank is at stage 0"
        assert number_of_groups() > before
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("sizes", "ep_size", "own"), [((4, 32, 1, 8), 1, 9), ((8, 16, 2, 4), 8, 13)])
def test_a_rank_of_a_thousand_asks_for_its_own_groups_alone(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int], ep_size: int, own: int
) -> None:
    """pp, dp, cp, tp of 1,024 ranks; groups have the names that torch gives where each rank asks for all of them."""

    def groups_of() -> list[tuple[str, list[int]]]:
        asked.clear()
        dist.init_process_group("fake", rank=341, world_size=1024, store=FakeStore())
        try:
            mesh = build_mesh(*sizes, ep_size=ep_size, device=torch.device("cpu"))
            link_group(mesh, "activations", 0), link_group(mesh, "gradients", 0)
            tied_group(mesh, (0, sizes[0] - 1)), stage_group(mesh)
            return [
                (group.group_name, dist.get_process_group_ranks(group))
                for group in asked
                if isinstance(group, dist.ProcessGroup)
            ]
        finally:
            dist.destroy_process_group()

    asked: list[dist.ProcessGroup | None] = []
    create = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: asked.append(create(*args, **options)) or asked[-1])
    found, number = groups_of(), len(asked)
    assert number == own
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # torch then waits for all ranks at each group
    monkeypatch.setattr(dist.distributed_c10d, "_store_based_barrier", lambda *_, **__: None)
    everywhere = groups_of()
    assert len(asked) > 1900 and [each for each in everywhere if 341 in each[1]] == found


def test_another_job_gets_other_groups() -> None:
    """Even if something still holds the default process group of the first."""
    join()
    world, mesh = dist.group.WORLD, build_mesh(2, 2, 1, 1)
    dist.destroy_process_group()
    join()
    try:
        assert dist.group.WORLD is not world
        assert build_mesh(2, 2, 1, 1) is not mesh
    finally:
        dist.destroy_process_group()


def test_groups_are_released_with_the_default_group() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh, control = weakref.ref(build_mesh(1, 1, 1, 1)), weakref.ref(control_group())
    gc.collect()
    assert mesh() is not None and control() is control_group()
    dist.destroy_process_group()
    gc.collect()
    assert mesh() is None and control() is None


def test_cleared_groups_are_created_again() -> None:
    join()
    try:
        mesh = build_mesh(2, 2, 1, 1)
        ProcessGroups.of_world().clear()
        assert build_mesh(2, 2, 1, 1) is not mesh
    finally:
        dist.destroy_process_group()


@pytest.fixture
def default_group_without_cpu() -> Iterator[None]:
    """Stands for `init_process_group("nccl")`: a default group that refuses CPU tensors."""
    dist.init_process_group("cuda:gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group_without_cpu")
def test_every_group_of_ours_takes_cpu_tensors() -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(()))
    mesh = build_mesh(1, 1, 1, 1)
    groups = [*mesh.axis_groups.values(), mesh.replica_group, link_group(mesh, 0), tied_group(mesh, (0,))]
    groups += [world_group(), control_group()]
    for group in groups:
        dist.all_reduce(torch.ones(()), group=group)
    assert world_group() is world_group()


def test_groups_besides_nccl_take_cpu_tensors_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend, **_: asked.append(backend))
    join()
    try:
        assert world_group() is dist.group.WORLD
        new_group([0])
        monkeypatch.setattr(type(dist.group.WORLD), "_device_types", [torch.device("cuda")])
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        new_group([0])
        world_group()
    finally:
        dist.destroy_process_group()
    assert asked == [None, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"]


def test_a_group_that_only_its_members_create_splits_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound device torch splits the default group's, in which all ranks of the job have to take part."""
    bound: list[torch.device | None] = []
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: bound.append(dist.group.WORLD.bound_device_id))
    join()
    try:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 3)
        new_group([0])
        new_group([0], use_local_synchronization=True)
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 3)
    finally:
        dist.destroy_process_group()
    assert bound == [torch.device("cuda", 3), None]
