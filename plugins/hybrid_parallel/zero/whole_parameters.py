"""Parameters that an optimizer reads whole, although ranks hold parts of them.

Muon orthogonalises a matrix, Adafactor factors it, Lamb divides by its norm: their updates are not those of its shards.
Such a parameter gets an owner among the ranks that hold its parts. The owner's optimizer holds it whole, in the order
of the unsharded model and without padding, with its state; the other ranks hold no state of it. A step sends values and
gradients to the owners, and the new values back, as distributed Muon does (Liu et al., arXiv 2502.16982, section 2.3).
Between steps the owner has the state alone: values are in the buckets, as those of all parameters.

A part (`ParameterExchange`) is a range of the flattened shard of one tensor- or expert-parallel rank. Any distribution
of parts is allowed: ranks may hold different numbers of them, and several ranks may hold the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster import failure
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import unscaled
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice
from shardformer.distributed.collectives import all_gather_flat
from shardformer.distributed.process_groups import all_gather_json
from shardformer.shard_spec import ShardSpec, parameter_like, spec_of


@dataclass(frozen=True)
class HeldPart:
    """A part on one rank."""

    index: int
    place: int  # which of the different shards it belongs to: copies of a shard have one place
    # start, stop: range in the flattened shard
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class ParameterExchange:
    """Exchanges parts of parameters in one collective for all of them.

    All ranks of the group must create it, with the same parameters, and call its methods in the same order.

    Args:
        specs: how the parameters are sharded; the ranks of a spec need not be those of the group.
        held: the parts on this rank, in the order in which values are passed.
    """

    def __init__(
        self,
        group: ProcessGroup,
        specs: Sequence[ShardSpec],
        owners: Sequence[int],
        held: Sequence[HeldPart],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.specs, self.owners, self.held = group, list(specs), list(owners), list(held)
        self.dtype, self.device = dtype, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        rows = all_gather_json([[part.index, part.place, part.start, part.stop] for part in held], group)
        self._parts = [[HeldPart(*part) for part in row] for row in rows]
        # Of several ranks with the same part, the first sends it; all of them receive it.
        seen: set[HeldPart] = set()
        self._sent: list[set[HeldPart]] = []
        for parts in self._parts:
            self._sent.append({part for part in parts if part not in seen})
            seen.update(parts)

    def agree(self, flags: Sequence[bool]) -> set[int]:
        """Return the parameters whose flag is set on any rank."""
        found = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        if self.world_size > 1:
            # On the CPU even if gradients are on a GPU: reading the result must not wait for the device.
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return set(found.nonzero().flatten().tolist())

    def to_owners(self, value_of: Callable[[int], Tensor], indices: Collection[int]) -> dict[int, Tensor]:
        """Send this rank's parts, `value_of`(position), of `indices` to owners; return the owned wholes."""
        wanted = set(indices)

        def passes(sender: int, owner: int) -> Iterator[int]:
            """Yield positions of the parts of a rank that it sends to an owner."""
            for position, part in enumerate(self._parts[sender]):
                if part.index in wanted and self.owners[part.index] == owner and part in self._sent[sender]:
                    yield position

        sent = [[value_of(position) for position in passes(self.rank, owner)] for owner in range(self.world_size)]
        arriving = [[self._parts[rank][at] for at in passes(rank, self.rank)] for rank in range(self.world_size)]
        shards: dict[tuple[int, int], Tensor] = {}
        for part, values in self._exchange(sent, arriving):
            self._add(shards, part, values)
        return self._assemble(shards, [index for index in sorted(wanted) if self.owners[index] == self.rank])

    def from_owners(self, whole_of: Callable[[int], Tensor], keep: Callable[[int, Tensor], None]) -> None:
        """Send owned whole parameters, `whole_of`(index), to holders; `keep`: (position in `held`, values)."""
        shards: dict[tuple[int, int], Tensor] = {}

        def cut(part: HeldPart) -> Tensor:
            key = part.index, part.place
            if key not in shards:
                shards[key] = self._spec_at(part).shard(whole_of(part.index)).reshape(-1)
            return shards[key][part.start : part.stop]

        sent = [[cut(part) for part in parts if self.owners[part.index] == self.rank] for parts in self._parts]
        mine = list(enumerate(self._parts[self.rank]))
        arriving = [[each for each in mine if self.owners[each[1].index] == owner] for owner in range(self.world_size)]
        found = self._exchange(sent, [[part for _, part in parts] for parts in arriving])
        positions = [position for parts in arriving for position, _ in parts]
        for position, (_, values) in zip(positions, found, strict=True):
            keep(position, values)

    # ----- helpers -----

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], arriving: Sequence[Sequence[HeldPart]]
    ) -> Iterator[tuple[HeldPart, Tensor]]:
        """Send a list of tensors to each rank; yield the parts that arrive from each, with their values, flat."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = [torch.cat([empty, *(each.reshape(-1) for each in parts)]) for parts in sent]
        sizes = [sum(part.size for part in parts) for parts in arriving]
        if self.world_size == 1:
            received = flat[0]
        else:
            received = empty.new_empty(sum(sizes))
            dist.all_to_all_single(received, torch.cat(flat), sizes, [len(each) for each in flat], group=self.group)
        parts = [part for each in arriving for part in each]
        yield from zip(parts, received.split([part.size for part in parts]) if parts else (), strict=True)

    def _add(self, shards: dict[tuple[int, int], Tensor], part: HeldPart, values: Tensor) -> None:
        """Add a part to the flat shard that it belongs to."""
        size = self._size_at(part)
        if part.size == size:
            shards[part.index, part.place] = values
            return
        shard = shards.setdefault((part.index, part.place), values.new_empty(size))
        shard[part.start : part.stop] = values

    def _assemble(self, shards: dict[tuple[int, int], Tensor], indices: Sequence[int]) -> dict[int, Tensor]:
        """Return whole parameters, in the order of the unsharded model and without padding."""
        found = {
            index: torch.empty(self.specs[index].full_shape, dtype=self.dtype, device=self.device) for index in indices
        }
        for (index, place), shard in shards.items():
            spec = self.specs[index].on_rank(place * self.specs[index].copies)
            spec.fill(found[index], shard.view(spec.local_shape))
        return found

    def _spec_at(self, part: HeldPart) -> ShardSpec:
        spec = self.specs[part.index]
        return spec.on_rank(part.place * spec.copies)

    def _size_at(self, part: HeldPart) -> int:
        return torch.Size(self._spec_at(part).local_shape).numel()


def is_cut(param: nn.Parameter) -> bool:
    """Return whether any rank of the parameter's axis holds only a part of it, or padding besides it."""
    spec = spec_of(param)
    return any(spec.on_rank(rank).local_shape != spec.full_shape for rank in range(spec.world_size))


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A whole parameter that this rank's optimizer updates, as code that handles states sees it: like a bucket."""

    local: nn.Parameter  # the parameter of the model
    params: Sequence[nn.Parameter]  # the whole parameter. It has values only during a step
    pieces: Sequence[BucketSlice]  # all of it
    group_index: int  # index of the optimizer's parameter group
    counted: bool  # whether this rank saves its state
    has_masters: bool = False  # False: the master weights are those of the buckets


@dataclass(frozen=True, eq=False)
class _CutParameter:
    """A parameter in a bucket of this rank; `whole` is None on ranks that do not own it."""

    param: nn.Parameter
    bucket: Bucket
    index: int
    owner: int
    whole: nn.Parameter | None


class WholeParameters:
    """The cut parameters of an optimizer that reads whole ones.

    Args:
        groups: axis over which parameters are sharded -> the ranks that hold their parts; empty for an optimizer that
            takes parts.
        names: parameter -> its name, the same on all ranks of these groups.
        counted: whether a rank of these groups saves the state of a parameter.
    """

    def __init__(
        self,
        groups: Mapping[str, ProcessGroup],
        names: Mapping[nn.Parameter, str],
        counted: Callable[[nn.Parameter], bool],
    ) -> None:
        self._groups, self._names, self._counted = groups, names, counted
        self._sets: dict[tuple[str, torch.dtype], _CutParameters] = {}
        self.owned: list[OwnedParameter] = []
        self._cut: set[nn.Parameter] = set()

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._cut

    def add(self, buckets: Sequence[Bucket]) -> list[OwnedParameter]:
        """Choose owners of cut parameters by their full shapes, as all ranks do; return what this one owns."""
        if not self._groups:
            return []
        found = [(bucket, index, param) for bucket in buckets for index, param in enumerate(bucket.params)]
        added = []
        for bucket, index, param in sorted(found, key=lambda each: (-_full_size(each[2]), self._names[each[2]])):
            if not is_cut(param):
                continue
            key = spec_of(param).axis, bucket.shard.values.dtype
            cuts = self._sets.setdefault(key, _CutParameters(self._groups[key[0]]))
            whole = cuts.add(param, bucket, index)
            self._cut.add(param)
            if whole is not None:
                piece = BucketSlice(0, 0, whole.numel(), 0, whole)
                added.append(OwnedParameter(param, [whole], [piece], bucket.group_index, self._counted(param)))
        self.owned += added
        return added

    def take_states(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Replace the states of cut parameters by those of the whole ones that this rank owns, which are the same."""
        wholes = {each.local: each.params[0] for each in self.owned}
        for param in [param for param in states if param in self._cut]:
            state = states.pop(param)
            if param in wholes:
                states[wholes[param]] = state

    def gather_values(self) -> None:
        """Give the owners the present values."""
        for cuts in self._sets.values():
            cuts.gather_values()

    def gather_gradients(self) -> None:
        """Give the owners the gradients of the pieces, whose own are dropped."""
        for cuts in self._sets.values():
            cuts.gather_gradients()

    def scatter_values(self) -> None:
        """Write the owners' values to the pieces."""
        for cuts in self._sets.values():
            cuts.scatter_values()

    def release(self) -> None:
        """Free the values and gradients of whole parameters."""
        for owned in self.owned:
            _release(owned.params[0])


class _CutParameters:
    """The cut parameters of one dtype on one axis."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._loads = [0] * dist.get_world_size(group)
        self._members: list[_CutParameter] = []

    def add(self, param: nn.Parameter, bucket: Bucket, index: int) -> nn.Parameter | None:
        """Give a parameter to the rank that owns the fewest elements; return it whole if that is this rank."""
        owner, whole = self._loads.index(min(self._loads)), None
        self._loads[owner] += _full_size(param)
        if owner == dist.get_rank(self.group):
            values = bucket.shard.values
            whole = parameter_like(param, values.new_empty(0)).requires_grad_(True)
            _release(whole, spec_of(param).full_shape)
        self._members.append(_CutParameter(param, bucket, index, owner, whole))
        self.__dict__.pop("_exchange", None)
        return whole

    def gather_values(self) -> None:
        """Give the owners the present values."""
        pieces = self._pieces
        found = self._exchange.to_owners(lambda at: pieces[at].parameter.detach(), range(len(self._members)))
        for index, values in found.items():
            self._members[index].whole.data = values

    def gather_gradients(self) -> None:
        """Give the owners the gradients of parameters that have one on any rank."""
        pieces, members = self._pieces, self._members
        used = self._exchange.agree([each.index in each.bucket.used for each in members])

        def gradient(at: int) -> Tensor:
            parameter = pieces[at].parameter
            return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

        found = self._exchange.to_owners(gradient, used)
        for index, member in enumerate(members):
            if member.whole is not None:
                member.whole.grad = found.get(index)
        for piece in pieces:
            piece.parameter.grad = None

    def scatter_values(self) -> None:
        """Write the owners' values to the pieces."""
        pieces = self._pieces
        self._exchange.from_owners(
            lambda index: self._members[index].whole.detach(),
            lambda at, values: pieces[at].parameter.data.copy_(values.view_as(pieces[at].parameter)),
        )

    @cached_property
    def _exchange(self) -> ParameterExchange:
        held = []
        for index, member in enumerate(self._members):
            spec = spec_of(member.param)
            place = spec.rank // spec.copies
            held += [HeldPart(index, place, piece.start, piece.stop) for piece in _pieces_of(member)]
        values = self._members[0].bucket.shard.values
        specs, owners = [spec_of(each.param) for each in self._members], [each.owner for each in self._members]
        return ParameterExchange(self.group, specs, owners, held, values.dtype, values.device)

    @property
    def _pieces(self) -> list[BucketSlice]:
        return [piece for member in self._members for piece in _pieces_of(member)]


def _pieces_of(member: _CutParameter) -> list[BucketSlice]:
    return [piece for piece in member.bucket.pieces if piece.index == member.index]


def _full_size(param: nn.Parameter) -> int:
    return torch.Size(spec_of(param).full_shape).numel()


def _release(whole: nn.Parameter, shape: Sequence[int] | None = None) -> None:
    """Keep the shape and the dtype alone: one element, repeated."""
    whole.grad = None
    whole.data = whole.data.new_zeros(1).expand(whole.shape if shape is None else shape)


def gather_pieces(bucket: Bucket, values: dict[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
    """All-gather whole local tensors, in the shape of the parameters, from the pieces of all ranks.

    All data-parallel ranks must call this; parameters without a piece on any rank are zeros.

    Args:
        values: parameter index -> values of its piece on this rank.

    Returns:
        The tensors by parameter index.
    """
    flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
    own = bucket.own_shard(flat)
    for piece in bucket.pieces:
        if piece.index in values:
            piece.view(own).copy_(values[piece.index].reshape(-1))
    if bucket.options.num_shards > 1:
        all_gather_flat(flat, own.clone(), group=bucket.options.shard_group)
    return {
        index: flat[offset : offset + param.numel()].view(param.shape)
        for index, (param, offset) in enumerate(zip(bucket.params, bucket.offsets, strict=True))
    }


def assemble(param: nn.Parameter, local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Assemble the full tensor, on every rank of the group, from the ranks' `local` shards, split like `param`."""
    spec = spec_of(param)
    if spec.dim is None:
        return local.clone()
    shapes = [spec.on_rank(rank).local_shape for rank in range(spec.world_size)]
    shards = [local.new_empty(shape) for shape in shapes]
    if len(set(shapes)) == 1:
        dist.all_gather(shards, local.contiguous(), group=group)
        return spec.assemble(shards)
    # An all-gather needs shards of one size: one broadcast each.
    for rank, shard in enumerate(shards):
        if rank == spec.rank:
            shard.copy_(local)
        dist.broadcast(shard, group=group, group_src=rank)
    return spec.assemble(shards)


@failure.guard("optimizer.full_gradients")
def full_gradients(
    buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str], mesh: HybridMesh, scale: float
) -> dict[str, Tensor]:
    """Return whole, unscaled gradients in buckets by name; `names`: parameter -> name; `scale`: their factor."""
    cut: dict[str, tuple[nn.Parameter, Tensor]] = {}
    for bucket in buckets:
        values = {piece.index: piece.view(bucket.shard_grads) for piece in bucket.pieces if bucket.used}
        for index, local in gather_pieces(bucket, values, bucket.grad_dtype).items():
            if index in bucket.used:
                param = bucket.params[index]
                cut[names[param]] = (param, unscaled(local, scale))
    # By name: tensor-parallel ranks sort their parameters into different buckets.
    return {
        name: assemble(param, local, mesh.group(spec_of(param).axis)) for name, (param, local) in sorted(cut.items())
    }
