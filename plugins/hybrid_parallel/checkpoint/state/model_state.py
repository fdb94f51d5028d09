"""The model part of a training state: the rectangles of tensors that this rank writes and reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor, local_tensors
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, replicate_axis
from shardformer.distributed.process_groups import all_gather_json
from shardformer.shard_spec import EXPERTS, TENSOR, spec_of

PREFIX = "model/"
MASTER = "master"  # key of the fp32 master of a 16-bit parameter among the optimizer states


def buffers_of_earlier_stages(model: HybridParallelModel, mesh: HybridMesh, group: dist.ProcessGroup) -> set[str]:
    """Return names of persistent buffers that an earlier stage has too: every stage has the buffers of the root model.

    Args:
        group: group of all ranks.
    """
    if mesh.size("pp") == 1:
        return set()
    here = [name for names, tensor in local_tensors(model, unique=True) for name in names if not _is_parameter(tensor)]
    found = all_gather_json([mesh.rank("pp"), here], group)
    return {name for stage, names in found if stage < mesh.rank("pp") for name in names}


def model_tensors(model: HybridParallelModel, mesh: HybridMesh, elsewhere: Collection[str]) -> dict[str, GlobalTensor]:
    """Return what this rank writes: one copy of each tensor over all ranks, distributed over data-parallel replicas.

    Args:
        elsewhere: buffers that another stage writes.
    """
    owned = [
        (names[0], tensor)
        for names, tensor in local_tensors(model, unique=True)
        if spec_of(tensor).is_owner and names[0] not in elsewhere and (_is_parameter(tensor) or mesh.rank("tp") == 0)
    ]
    found = {}
    whole = [(name, tensor) for name, tensor in owned if model.gathers.holder(tensor) is None]
    for name, tensor in owned:
        holder = model.gathers.holder(tensor)
        if holder is not None and holder.options.counts:
            found[f"{PREFIX}{name}"] = piece_of(model, tensor)
    mine: list[tuple[str, Tensor]] = []
    for axis in (TENSOR, EXPERTS):
        alike = [(name, tensor) for name, tensor in whole if spec_of(tensor).axis == axis]
        mine += _share(alike, mesh.rank(replicate_axis(axis)), mesh.size(replicate_axis(axis)))
    return found | {f"{PREFIX}{name}": GlobalTensor.piece(spec_of(tensor), tensor) for name, tensor in mine}


def tensors_to_fill(
    model: HybridParallelModel, manifest: Manifest, group: dist.ProcessGroup
) -> dict[str, GlobalTensor]:
    """Return the model's local tensors under their names in the checkpoint.

    A parameter that is fp32 here but was saved in 16 bit with an fp32 master is read from the master.

    Raises:
        ConfigurationError: the checkpoint is of a different model; raised on all ranks.
    """
    found: dict[str, GlobalTensor] = {}
    missing = []
    for names, tensor in local_tensors(model, unique=False):
        saved = next((name for name in names if f"{PREFIX}{name}" in manifest.tensors), None)
        if saved is None:
            missing.append(names[0])
            continue
        found[precise_name(manifest, saved, tensor)] = piece_of(model, tensor)
    names = {name.removeprefix(PREFIX) for name in manifest.tensors if name.startswith(PREFIX)}
    unexpected = sorted(names - model.origin.names)
    missing = sorted({name for names in all_gather_json(missing, group) for name in names})
    if missing or unexpected:
        raise ConfigurationError(
            f"the checkpoint does not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]}; "
            "load a checkpoint of the same class"
        )
    return found


def clear_padding(model: HybridParallelModel) -> None:
    """Zero the padding rows of vocabularies, which are not saved."""
    for _, tensor in local_tensors(model, unique=False):
        if spec_of(tensor).is_padded:
            holder = model.gathers.holder(tensor)
            (tensor.detach() if holder is None else holder.own_slice(tensor)[2]).zero_()


def precise_name(manifest: Manifest, name: str, wanted: Tensor) -> str:
    """Return the name of the most precise saved value of a parameter that the dtype of `wanted` can represent."""
    saved = manifest.tensors[f"{PREFIX}{name}"]
    master = f"optimizer/{name}/{MASTER}"
    is_wider = wanted.dtype.is_floating_point and wanted.dtype.itemsize > saved.torch_dtype.itemsize
    return master if is_wider and master in manifest.tensors else f"{PREFIX}{name}"


def piece_of(model: HybridParallelModel, tensor: Tensor) -> GlobalTensor:
    """Return what this rank has of a tensor: its shard under ZeRO stage 3, otherwise its tensor-parallel piece."""
    holder = model.gathers.holder(tensor)
    if holder is None:
        return GlobalTensor.piece(spec_of(tensor), tensor)
    start, stop, values = holder.own_slice(tensor)
    return GlobalTensor.piece(spec_of(tensor), values, start, stop)


def _share(owned: list[tuple[str, Tensor]], rank: int, world_size: int) -> Iterable[tuple[str, Tensor]]:
    """Yield this rank's share: parameters balanced by bytes; buffers, which may differ, from the first replica."""
    total = sum(tensor.nbytes for _, tensor in owned)
    position = 0
    for name, tensor in owned:
        middle = position + tensor.nbytes / 2
        position += tensor.nbytes
        owner = min(int(middle * world_size / max(total, 1)), world_size - 1)
        if rank == (owner if _is_parameter(tensor) else 0):
            yield name, tensor


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
