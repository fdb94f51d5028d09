"""ShardSpec: cutting a full tensor and putting it together again, for every shape of cut that a family may ask for.

What breaks here first: uneven heads, padded vocabularies and fused parts. Look in `shardformer/shard_spec.py`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardformer import ShardSpec, spec_of
from shardformer.shard_spec import Part, pad_to_multiple, shard_parameter


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    """The spec of rank 0 of a cut: uneven units, padded parts, several parts, copies."""
    pieces = draw(st.integers(1, 5))
    copies = draw(st.sampled_from([1, 2, 3]))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        unit = draw(st.integers(1, 4))
        size = unit * draw(st.integers(1, 9))
        padded = pad_to_multiple(size, pieces * draw(st.integers(1, 6))) if draw(st.booleans()) else None
        parts.append(Part(size, 1 if padded else unit, padded))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(part.size for part in parts)
    return ShardSpec(tuple(shape), dim, tuple(parts), 0, pieces * copies, copies)


@settings(max_examples=150, deadline=None)
@given(specs())
def test_shards_assemble_to_the_full_tensor(spec: ShardSpec) -> None:
    full = torch.rand(spec.full_shape) + 1  # nothing is zero but padding
    ranks = [spec.on_rank(rank) for rank in range(spec.world_size)]
    shards = [rank_spec.shard(full) for rank_spec in ranks]
    assert [tuple(shard.shape) for shard in shards] == [rank_spec.local_shape for rank_spec in ranks]
    assert torch.equal(spec.assemble(shards), full)
    padding = sum(padding for rank_spec in ranks for _, _, padding in rank_spec.pieces())
    zeros = sum((shard == 0).sum().item() for shard in shards)
    assert zeros == padding * full.numel() // full.shape[spec.dim]


@settings(max_examples=150, deadline=None)
@given(specs())
def test_owners_cover_every_row_once_and_units_stay_together(spec: ShardSpec) -> None:
    owners = [s for rank in range(spec.world_size) if (s := spec.on_rank(rank)).is_owner]
    rows = [row for owner in owners for start, stop, _ in owner.pieces() for row in range(start, stop)]
    assert sorted(rows) == list(range(spec.full_shape[spec.dim]))
    for owner in owners:
        offset = 0
        for part, (start, stop, padding) in zip(spec.parts, owner.pieces(), strict=True):
            assert (start - offset) % part.unit == 0 and (stop - offset) % part.unit == 0
            assert padding == 0 or part.padded_size is not None
            offset += part.size


def test_copies_are_neighbours_that_hold_the_same_piece() -> None:
    spec = ShardSpec((6, 2), 0, (Part(6, unit=3),), world_size=4, copies=2)
    full = torch.arange(12.0).view(6, 2)
    shards = [spec.on_rank(rank).shard(full) for rank in range(4)]
    assert torch.equal(shards[0], shards[1]) and torch.equal(shards[2], shards[3])
    assert torch.equal(torch.cat([shards[0], shards[2]]), full)
    assert [spec.on_rank(rank).is_owner for rank in range(4)] == [True, False, True, False]


def test_fused_parts_are_cut_one_by_one() -> None:
    spec = ShardSpec((6,), 0, (Part(2), Part(4)), rank=1, world_size=2)
    assert spec.shard(torch.arange(6)).tolist() == [1, 4, 5]


@pytest.mark.parametrize("size", [5, 100])
def test_a_rank_without_a_valid_row_has_padding_only(size: int) -> None:
    padded = pad_to_multiple(size, 64 * 4)
    specs_of_ranks = [ShardSpec((size, 3), 0, (Part(size, padded_size=padded),), rank, 4) for rank in range(4)]
    assert specs_of_ranks[3].pieces() == [(size, size, 64)]
    assert torch.count_nonzero(specs_of_ranks[3].shard(torch.ones(size, 3))) == 0
    assert sum(stop - start for spec in specs_of_ranks for start, stop, _ in spec.pieces()) == size


def test_more_ranks_than_rows_leaves_empty_pieces() -> None:
    shards = [ShardSpec((2, 3), 0, (Part(2),), rank, 4).shard(torch.ones(2, 3)) for rank in range(4)]
    assert sorted(len(shard) for shard in shards) == [0, 0, 1, 1]


def test_shard_is_a_copy_and_a_tensor_without_a_spec_is_whole() -> None:
    full = torch.ones(4, 2)
    for spec in (ShardSpec((4, 2), 0, (Part(4),), 0, 2), spec_of(full)):
        spec.shard(full).fill_(7.0)
    assert torch.equal(full, torch.ones(4, 2))
    assert spec_of(full).local_shape == (4, 2)
    assert [ShardSpec((4,), rank=rank, world_size=2).is_owner for rank in range(2)] == [True, False]


def test_attributes_that_a_user_gave_a_parameter_are_those_of_its_piece() -> None:
    whole = nn.Parameter(torch.ones(4, 2), requires_grad=False)
    whole.is_slow, whole.grad_group = True, "another's"
    piece = shard_parameter(whole, ShardSpec((4, 2), 0, (Part(4),), 0, 2))
    assert piece.is_slow and not piece.requires_grad and piece.shape == (2, 2)
    assert piece.grad_group is None and piece.shard_spec.full_shape == (4, 2)
