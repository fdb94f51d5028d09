"""Steps of `configure` for `reproducible=True`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.config.debugging import DebugOptions
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.reproducible.limits import check_names_of_tied
from plugins.hybrid_parallel.reproducible.separate_uses import separate_uses
from plugins.hybrid_parallel.reproducible.unit_stream import UnitStream
from plugins.hybrid_parallel.reproducible.units import Units
from shardformer.distributed.process_groups import world_group


def units_of(options: DebugOptions, mesh: HybridMesh, seed: int) -> Units | None:
    """Return what cuts batches into units; None without `reproducible=True`. All ranks must call this.

    Args:
        seed: seed of the random streams on this rank; that of the first rank counts.
    """
    if not options.reproducible:
        return None
    shared_seed = torch.tensor(seed, dtype=torch.int64)
    if dist.get_world_size() > 1:
        dist.broadcast(shared_seed, src=0, group=world_group())
    return Units(options.reproducible_unit, mesh, UnitStream(int(shared_seed)))


def attach_units(model: HybridParallelModel) -> None:
    """Have the modules of all stages of this rank draw random numbers by unit, and use tied parameters separately.

    Raises:
        ConfigurationError: if stages share layers.
    """
    check_names_of_tied(model.tied, model.unwrap(), model.origin.aliases)
    runtime, modules = model.runtime, []
    for stage in runtime.stages:
        with runtime.viewing(stage):
            model.units.stream.attach(runtime.module)
            modules += runtime.module.named_modules(remove_duplicate=False)
    separate_uses(modules)
    runtime.register_microbatch_hook(model.units.stream.begin_unit)
