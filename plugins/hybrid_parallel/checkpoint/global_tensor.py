"""GlobalTensor: a tensor of the whole model, stored on each rank as a set of rectangles.

Checkpoints store whole tensors under Hugging Face names. A rank holds a shard along one dim (tensor parallelism), which
may consist of several parts (a fused query-key-value weight), and of this shard a range of flattened elements (ZeRO).
Both are exact unions of rectangles of the whole tensor, which `torch.distributed.checkpoint` can store and reshard. A
save gathers nothing, and each rank writes only its own data.

Files of whole tensors do need a gather: on the first rank of a group, or as a state dict on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, replicate_axis
from plugins.hybrid_parallel.guards import WholeState
from plugins.hybrid_parallel.zero.stage3 import ShardedParameters
from plugins.hybrid_parallel.zero.whole_parameters import assemble
from shardformer.distributed.collectives import as_bytes
from shardformer.distributed.process_groups import ProcessGroups, all_gather_json, message_group
from shardformer.matmul.quantised import is_quantised
from shardformer.shard_spec import EXPERTS, TENSOR, ShardSpec, spec_of

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunk:
    """A rectangle of the whole tensor that is on this rank."""

    # offsets, sizes: position and shape in the whole tensor
    offsets: Sizes
    sizes: Sizes
    values: Tensor  # elements of the rectangle, of shape `sizes`; a view of the rank's own memory

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Position and shape of this rectangle, as `torch.distributed.checkpoint` describes them."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))


class GlobalTensor:
    """The local rectangles of a whole tensor; `torch.distributed.checkpoint` accepts it instead of a tensor."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, rectangles: Sequence[TensorChunk]) -> None:
        self.shape, self.dtype, self.rectangles = tuple(shape), dtype, list(rectangles)

    @classmethod
    def whole(cls, tensor: Tensor) -> GlobalTensor:
        """Wrap a tensor that is complete on this rank."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, [TensorChunk((0,) * len(shape), shape, tensor.detach())])

    @classmethod
    def piece(cls, spec: ShardSpec, values: Tensor, start: int = 0, stop: int | None = None) -> GlobalTensor:
        """Wrap `values`, elements `start` to `stop` (default: all) of the flattened local shard of a `spec`."""
        stop = math.prod(spec.local_shape) if stop is None else stop
        flat = values.detach().reshape(-1)
        found = []
        for offsets, sizes in rectangles_of_range(spec.local_shape, start, stop):
            begin = _flat_index(spec.local_shape, offsets) - start
            view = flat[begin : begin + math.prod(sizes)].view(sizes)
            found += [TensorChunk(*place, part) for place, part in _in_whole(spec, offsets, view)]
        return cls(spec.full_shape, values.dtype, found)

    # ----- the protocol of torch.distributed.checkpoint -----

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:  # noqa: PLW3201
        return [
            WriteItem(
                index=MetadataIndex(name, each.chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(each.chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for index, each in enumerate(self.rectangles)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # noqa: PLW3201
        return [each.chunk for each in self.rectangles]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:  # noqa: PLW3201
        return next(each.values for each in self.rectangles if each.offsets == tuple(index.offset))


def rectangles_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Split the range [start, stop) of a flattened tensor into rectangles (offsets, sizes), each contiguous in memory.

    A range of a matrix has at most three: the end of a row, whole rows, the start of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(last, rest, start - last * row, stop - last * row)
        return
    yield from _in_row(first - 1, rest, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0,) * len(rest)), (last - first, *rest)
    yield from _in_row(last, rest, 0, stop - last * row)


def _in_row(index: int, shape: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    for offsets, sizes in rectangles_of_range(shape, start, stop):
        yield (index, *offsets), (1, *sizes)


def _flat_index(shape: Sequence[int], offsets: Sequence[int]) -> int:
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def _in_whole(spec: ShardSpec, offsets: Sizes, view: Tensor) -> Iterator[tuple[tuple[Sizes, Sizes], Tensor]]:
    """Map a rectangle of the local shard to rectangles of the whole tensor: one per part, none for padding."""
    if spec.dim is None:
        yield (offsets, tuple(view.shape)), view
        return
    dim, position = spec.dim, 0
    begin, end = offsets[dim], offsets[dim] + view.shape[dim]
    for start, stop, padding in spec.pieces():
        low, high = max(begin, position), min(end, position + stop - start)
        if low < high:
            part = view.narrow(dim, low - begin, high - low)
            place = (*offsets[:dim], start + low - position, *offsets[dim + 1 :])
            yield (place, tuple(part.shape)), part
        position += stop - start + padding


def local_tensors(model: HybridParallelModel, unique: bool) -> Iterator[tuple[list[str], Tensor]]:
    """Yield (all its names, tensor) for each local parameter and persistent buffer; `unique`: saved here."""
    module = model.unwrap()
    persistent = set(module.state_dict(keep_vars=True))
    groups: dict[int, tuple[list[str], Tensor]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        # Quantised weights never change, and what a layout cuts of them is no rectangle of the whole.
        if name in persistent and not is_quantised(tensor):
            groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, tensor in groups.values():
        if not unique or tensor not in model.saved_elsewhere:
            yield (
                names + [alias for name in names for alias in model.origin.aliases.get(name, ()) if alias not in names],
                tensor,
            )


PREFIX = "model/"
MASTER = "master"  # key of the fp32 master of a 16-bit parameter among the optimizer states


def buffers_of_earlier_stages(model: HybridParallelModel, mesh: HybridMesh, group: dist.ProcessGroup) -> set[str]:
    """Return names of persistent buffers that an earlier stage of the `group` of all ranks has too."""
    if mesh.size("pp") == 1:
        return set()
    here = [name for names, tensor in local_tensors(model, unique=True) for name in names if not _is_parameter(tensor)]
    found = all_gather_json([mesh.rank("pp"), here], group)
    return {name for stage, names in found if stage < mesh.rank("pp") for name in names}


def model_tensors(model: HybridParallelModel, mesh: HybridMesh, elsewhere: Collection[str]) -> dict[str, GlobalTensor]:
    """Return what this rank writes of one copy of each tensor, without buffers that are written `elsewhere`."""
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


@dataclass
class Gather:
    """A gather in progress of one tensor to the first rank of its group."""

    local: Tensor  # shard of this rank
    spec: ShardSpec  # sharding of the tensor
    others: dict[int, Tensor] = field(default_factory=dict)  # on the first rank, the shards of the other ranks, by rank
    requests: list[Any] = field(default_factory=list)  # pending send and receive operations

    @staticmethod
    def begin(
        tensor: Tensor, dtype: torch.dtype | None, group: dist.ProcessGroup, spec: ShardSpec | None = None
    ) -> Gather:
        """Start to send this rank's shard, or to receive the other shards; all ranks of the group must call it.

        Args:
            tensor: parameter or buffer; it must not change before the gather has finished.
            dtype: target dtype of a floating-point tensor; None keeps its dtype.
            group: process group that shards the tensor.
            spec: sharding of the tensor; None for that of the parameter or buffer.
        """
        local, spec = tensor.detach(), spec or spec_of(tensor)
        if dtype is not None and local.is_floating_point():
            local = local.to(dtype)
        local = local.contiguous()
        gather = Gather(local, spec)
        if spec.dim is None:
            return gather
        group = open_for_messages(group, local.device)
        if spec.rank > 0:
            if spec.is_owner and local.numel():
                gather.requests = _batched(dist.isend, {0: local}, group)
            return gather
        for rank in range(1, spec.world_size):
            there = spec.on_rank(rank)
            if there.is_owner:
                gather.others[rank] = local.new_empty(there.local_shape)
        gather.requests = _batched(dist.irecv, gather.others, group)
        return gather

    def finish(self) -> Tensor | None:
        """Wait for the gather, and return the full tensor on the first rank and None on the others."""
        for request in self.requests:
            request.wait()
        if self.spec.rank > 0:
            return None
        if self.spec.dim is None:
            return self.local
        full = self.local.new_empty(self.spec.full_shape)
        for rank, piece in {0: self.local, **self.others}.items():
            self.spec.on_rank(rank).fill(full, piece)
        return full


@dataclass
class ReplicaGather:
    """Gather of one parameter's ZeRO slices: to one replica, whose tensor-parallel ranks gather the tensor."""

    local: Tensor | None  # on the ranks of that replica, memory for this rank's shard, flat; None on the others
    sent: Tensor  # this rank's slice, which is in memory until it has arrived
    spec: ShardSpec  # sharding of the tensor
    shape: torch.Size  # shape of this rank's shard
    group: dist.ProcessGroup  # process group that shards the tensor
    requests: list[Any]  # pending send and receive operations

    @staticmethod
    def begin(
        param: nn.Parameter,
        holder: ShardedParameters,
        dtype: torch.dtype | None,
        group: dist.ProcessGroup,
        destination: int,
    ) -> ReplicaGather:
        """Start to send this rank's slice, or to receive those of the others; all ranks that share it must call it.

        Args:
            holder: what has this rank's slice of it.
            dtype: target dtype; None keeps its own.
            group: process group that shards the tensor.
            destination: rank of the replica that gathers, among those that share the parameter.
        """
        replicas, (start, stop, values) = holder.options.shard_group, holder.own_slice(param)
        values, local = values.to(dtype or values.dtype), None
        replicas = open_for_messages(replicas, values.device)
        if holder.rank == destination:
            local = values.new_empty(param.numel())
            local[start:stop] = values
            parts = {rank: holder.slice_on(rank, param) for rank in range(dist.get_world_size(replicas))}
            others = {rank: local[part.start : part.stop] for rank, part in parts.items() if rank != destination}
            requests = _batched(dist.irecv, others, replicas)
        else:
            requests = _batched(dist.isend, {destination: values}, replicas)
        return ReplicaGather(local, values, spec_of(param), param.shape, group, requests)

    def finish(self) -> Tensor | None:
        """Wait for the gather, and return the full tensor on the first rank of the replica, None on all others."""
        for request in self.requests:
            request.wait()
        if self.local is None:
            return None
        return Gather.begin(self.local.view(self.shape), None, self.group, self.spec).finish()


def open_for_messages(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks for messages; all ranks of the group must call this.

    NCCL makes its communicator here, if it has none. Batched messages use it, and then need only the ranks that
    exchange some. Messages that are not batched would make a further communicator, with buffers of its own, for each
    pair of ranks.
    """
    group = message_group(group)
    if device.type != "cpu":
        key = ("communicator", group.group_name)
        ProcessGroups.of_world().get_or_create(
            key, lambda: dist.all_reduce(torch.zeros((), device=device), group=group)
        )
    return group


def send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send a contiguous tensor to rank `to` of a group, which calls `receive`."""
    for request in _batched(dist.isend, {to: tensor}, group):
        request.wait()


def receive(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill `tensor` with the values that rank `source` of a group sends."""
    for request in _batched(dist.irecv, {source: tensor}, group):
        request.wait()


def _batched(operation: Callable[..., Any], tensors: Mapping[int, Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to send or receive tensors, dense, by peer, as bytes: no backend supports all dtypes."""
    operations = [
        dist.P2POp(operation, as_bytes(tensor.view(-1)), group=group, group_peer=peer)
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def whole_state_dict(model: HybridParallelModel, mesh: HybridMesh) -> WholeState:
    """Return all parameters and persistent buffers, whole, by all names (tied ones as one); all ranks call it."""
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
