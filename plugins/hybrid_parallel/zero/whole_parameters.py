"""Parameters that an optimizer reads whole, although ranks hold parts of them.

Muon orthogonalises a matrix, Adafactor factors it, Lamb divides by its norm: their updates are not those of its shards.
Such a parameter gets an owner among the ranks that hold its parts. The owner's optimizer holds it whole, in the order
of the unsharded model and without padding, with its state; the other ranks hold no state of it. A step sends values and
gradients to the owners, and the new values back, as distributed Muon does (Liu et al., arXiv 2502.16982, section 2.3).
Between steps the owner has the state alone: values are in the buckets, as those of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice
from plugins.hybrid_parallel.zero.parameter_exchange import HeldPart, ParameterExchange
from shardformer.shard_spec import parameter_like, spec_of


def is_cut(param: nn.Parameter) -> bool:
    """Return whether any rank of the parameter's axis holds only a part of it, or padding besides it."""
    spec = spec_of(param)
    return any(spec.on_rank(rank).local_shape != spec.full_shape for rank in range(spec.world_size))


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A whole parameter that this rank's optimizer updates, as code that handles states sees it: like a bucket.

    Attributes:
        local: the parameter of the model.
        params: the whole parameter. It has values only during a step.
        pieces: all of it.
        group_index: index of the optimizer's parameter group.
        counted: whether this rank saves its state.
        has_masters: False: the master weights are those of the buckets.
    """

    local: nn.Parameter
    params: Sequence[nn.Parameter]
    pieces: Sequence[BucketSlice]
    group_index: int
    counted: bool
    has_masters: bool = False


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
        """Choose owners of the cut parameters in buckets; return those that this rank owns.

        Ranks do not communicate here: they choose from the full shapes, which all of them know.
        """
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
    """The cut parameters of one dtype on one axis.

    Args:
        group: the ranks that hold their parts.
    """

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
