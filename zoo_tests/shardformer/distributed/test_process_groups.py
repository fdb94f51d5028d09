"""Process groups are created once, and end with the default process group."""

from __future__ import annotations

import gc
import weakref

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from plugins.hybrid_parallel.distributed.mesh import build_mesh, control_group, link_group, tied_group
from shardformer.distributed.process_groups import ProcessGroups


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
        assert (link_group(mesh, "activations", 0), tied_group(mesh, (0, 1))) == groups
        assert number_of_groups() == before
        assert build_mesh(2, 1, 1, 2) is not mesh
        assert link_group(mesh, "gradients", 0) not in groups
        assert tied_group(mesh, (1,)) is None, "this rank is at stage 0"
        assert number_of_groups() > before
    finally:
        dist.destroy_process_group()


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
