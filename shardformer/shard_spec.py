"""ShardSpec: how the full tensor of a parameter is sharded over one mesh axis.

Every parameter of a sharded model is a plain local tensor that carries its spec. Checkpoints, ZeRO, the gradient
norm and the tests read only the spec; they do not depend on the kind of layer that a parameter belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn
from torch.distributed import ProcessGroup

# Mesh axes over which tensors are sharded. EXPERTS is the product of the expert- and tensor-parallel axes: the ranks of
# one tensor-parallel group hold copies of the same experts, and the tensor-parallel rank varies fastest.
TENSOR, EXPERTS = "tp", "ep_tp"
# Attributes that this package sets on each parameter; they must not be copied to another parameter.
_OWN_ATTRIBUTES = frozenset({"shard_spec", "grad_group", "partial_sum", "grad_buffer", "bucket_place"})


@dataclass(frozen=True)
class Part:
    """One independently sharded part of a fused tensor (the query part of a fused QKV weight)."""

    size: int  # rows of the part in the full tensor, without padding
    unit: int = 1  # rows that must stay together, such as `head_dim` for a projection to attention heads
    padded_size: int | None = None  # rows after padding, divisible by the number of shards; None for no padding

    def piece(self, index: int, num_pieces: int) -> tuple[int, int, int]:
        """Return (start, stop, padding rows) of piece `index`; start and stop are relative to the part."""
        if self.padded_size is not None:
            block = self.padded_size // num_pieces
            start, stop = (min(index * block, self.size), min((index + 1) * block, self.size))
            return start, stop, block - (stop - start)
        share, rest = divmod(self.size // self.unit, num_pieces)  # the first ranks get one more unit
        start, stop = (share * place + min(place, rest) for place in (index, index + 1))
        return start * self.unit, stop * self.unit, 0


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of a full tensor over `world_size` ranks, and the piece of this rank.

    Attributes:
        full_shape: shape of the full tensor, as in transformers (without padding).
        dim: the sharded dim; None if the tensor is replicated.
        parts: the parts along `dim`, each sharded independently; a plain weight has one.
        rank, world_size: this rank's index on the mesh axis, and the size of the axis.
        copies: number of ranks that hold the same piece (more than one if key/value heads are fewer than ranks).
        axis: name of the mesh axis, `TENSOR` or `EXPERTS`.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    parts: tuple[Part, ...] = ()
    rank: int = 0
    world_size: int = 1
    copies: int = 1
    axis: str = TENSOR

    @property
    def is_owner(self) -> bool:
        """Whether this rank accounts for the piece in norms, parameter counts and files; its copies do not."""
        return self.rank == 0 if self.dim is None else self.rank % self.copies == 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        if self.dim is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.dim] = sum(stop - start + padding for start, stop, padding in self.pieces())
        return tuple(shape)

    @property
    def is_padded(self) -> bool:
        """Whether the local piece has padding rows, which the full tensor does not have."""
        return self.dim is not None and any(padding for *_, padding in self.pieces())

    def on_rank(self, rank: int) -> ShardSpec:
        """Return the spec of another rank's piece of the same tensor."""
        return replace(self, rank=rank)

    def pieces(self) -> list[tuple[int, int, int]]:
        """Return (start, stop, padding) of each part's piece on this rank; start and stop index the full tensor."""
        pieces, offset = [], 0
        for part in self.parts:
            start, stop, padding = part.piece(self.rank // self.copies, self.world_size // self.copies)
            pieces.append((offset + start, offset + stop, padding))
            offset += part.size
        return pieces

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's piece of `full` as a new contiguous tensor; padding is zero."""
        if self.dim is None:
            return full.detach().clone()
        out = full.new_zeros(self.local_shape)
        position = 0
        for start, stop, padding in self.pieces():
            out.narrow(self.dim, position, stop - start).copy_(full.narrow(self.dim, start, stop - start))
            position += stop - start + padding
        return out

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """Assemble the full tensor from the pieces of all ranks in rank order."""
        if self.dim is None:
            return shards[0]
        full = shards[0].new_empty(self.full_shape)
        for rank, shard in enumerate(shards):
            self.on_rank(rank).fill(full, shard)
        return full

    def fill(self, full: Tensor, shard: Tensor) -> None:
        """Copy this rank's piece to its position in the full tensor, without the padding."""
        position = 0
        for start, stop, padding in self.pieces():
            full.narrow(self.dim, start, stop - start).copy_(shard.narrow(self.dim, position, stop - start))
            position += stop - start + padding


def annotate(parameter: nn.Parameter, spec: ShardSpec, grad_group: ProcessGroup | None = None) -> nn.Parameter:
    """Attach `spec` to `parameter`; `grad_group` is the group over which its local gradients are partial sums."""
    parameter.shard_spec = spec
    parameter.grad_group = grad_group
    return parameter


def spec_of(tensor: Tensor) -> ShardSpec:
    """Return the spec of a parameter or buffer; a tensor without a spec is not sharded."""
    return getattr(tensor, "shard_spec", None) or ShardSpec(tuple(tensor.shape))


def grad_group_of(parameter: Tensor) -> ProcessGroup | None:
    """Return the group over which the parameter's gradient must be summed, or None if the gradient is complete."""
    return getattr(parameter, "grad_group", None)


def shard_parameter(parameter: nn.Parameter, spec: ShardSpec, grad_group: ProcessGroup | None = None) -> nn.Parameter:
    """Create a parameter that holds this rank's piece of `parameter`."""
    return annotate(parameter_like(parameter, spec.shard(parameter.data)), spec, grad_group)


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Create a parameter with `values` that keeps the attributes a user has set on `parameter`."""
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if name not in _OWN_ATTRIBUTES:
            setattr(made, name, value)
    return made


def pad_to_multiple(size: int, multiple: int) -> int:
    """Round `size` up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def divided_share(parameters: Iterable[Tensor]) -> float:
    """Return the share of the elements of whole parameters that ranks divide, between 0 and 1."""
    specs = [spec_of(parameter) for parameter in parameters]
    sizes = [(prod(spec.full_shape), spec.dim is not None) for spec in specs]
    return sum(size for size, is_cut in sizes if is_cut) / max(sum(size for size, _ in sizes), 1)
