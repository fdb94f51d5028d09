"""The state dict of the whole model, on every rank, in host memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.state.local_tensors import local_tensors
from plugins.hybrid_parallel.distributed.agreement import all_gather_json
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.guards import WholeState
from plugins.hybrid_parallel.zero.assemble import assemble
from shardformer.shard_spec import spec_of


def whole_state_dict(model: HybridParallelModel, mesh: HybridMesh) -> WholeState:
    """Return the whole model's parameters and persistent buffers by all of their names; all ranks call it.

    The tensors of tied names are the same one, as in the model that was given to `boost`.
    """
    mine: dict[str, Tensor] = {}
    for names, tensor in local_tensors(model, unique=True):
        full = assemble(tensor, tensor.detach(), mesh.group(spec_of(tensor).axis)).cpu()
        mine |= dict.fromkeys(names, full)
    return WholeState(mine if mesh.size("pp") == 1 else _of_all_stages(mine, mesh))


def _of_all_stages(mine: dict[str, Tensor], mesh: HybridMesh) -> dict[str, Tensor]:
    """Broadcast the tensors of each stage to the others; of those that several stages hold, the first one's."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in mine.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    described = [
        (names, str(mine[names[0]].dtype).removeprefix("torch."), list(mine[names[0]].shape))
        for names in by_tensor.values()
    ]
    group, whole = mesh.group("pp"), dict[str, Tensor]()
    for stage, tensors in enumerate(all_gather_json(described, group)):
        for names, dtype, shape in tensors:
            if names[0] in whole:
                continue
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
            if stage == mesh.rank("pp"):
                value.copy_(mine[names[0]])
            dist.broadcast(value, group=group, group_src=stage)
            whole |= dict.fromkeys(names, value.cpu())
    return whole
