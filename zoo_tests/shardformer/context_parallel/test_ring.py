"""Attention over keys that travel from rank to rank is attention over all keys, forward and backward.

What breaks here first: a block at the wrong place, rows that see nothing, the sum of exponentials of 16-bit inputs.
Look in `shardformer/context_parallel/ring.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from shardformer.context_parallel.attention import ContextMask
from shardformer.context_parallel.ring import Block, Blocks, Softmax, attend, merge, ring_attention
from shardformer.context_parallel.zigzag import (
    ContextParallelPass,
    ZigzagSharding,
    cut_batch,
    hides_nothing,
    record_facts,
    restarts,
)
from zoo_tests.cuda_trace.recorder import recorded_on_meta
from zoo_tests.harness.ranks import distributed

_HEADS, _KV_HEADS, _SIZE, _LENGTH = 6, 2, 8, 23


def _whole(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value [2, heads, seq, head_dim] and the gradient of what they find."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, _LENGTH, _SIZE) for heads in (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)]
    query, key, value, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.to(dtype), key.to(dtype), value.to(dtype), grad.to(dtype)


def _expected(allowed: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Torch's own attention, and its gradients; a row that sees nothing finds zero."""
    *inputs, grad = _whole(dtype)
    inputs = [x.double().requires_grad_() for x in inputs]
    query, key, value = inputs
    key, value = (x.repeat_interleave(_HEADS // _KV_HEADS, 1) for x in (key, value))
    found = F.scaled_dot_product_attention(query, key, value, allowed) * allowed.any(-1, keepdim=True)
    found.backward(grad.double())
    return [found.detach(), *(x.grad for x in inputs)]


def _check(allowed: Tensor, dtype: torch.dtype = torch.float64, tolerance: float = 1e-12) -> None:
    """`allowed`, [2, 1, seq, seq], in a ring of all ranks."""
    axis = ZigzagSharding(dist.group.WORLD)
    *inputs, grad = (axis.take(x, 2) for x in _whole(dtype))
    inputs = [x.requires_grad_() for x in inputs]
    found = ring_attention(*inputs, _blocks(axis, allowed), Softmax(_SIZE**-0.5), axis.group)
    found.backward(grad)
    for part, whole in zip([found, *(x.grad for x in inputs)], _expected(allowed, dtype), strict=True):
        assert torch.allclose(part.double(), axis.take(whole, 2), atol=tolerance, rtol=tolerance)


def _blocks(axis: ZigzagSharding, allowed: Tensor) -> Blocks:
    behind = 2 * axis.size * axis.chunk(_LENGTH) - _LENGTH
    padded = F.pad(allowed, (0, behind, 0, behind))

    def blocks(source: int) -> list[Block]:
        rows, columns = (axis.places(_LENGTH, rank) for rank in (axis.rank, source))
        return [Block(slice(None), slice(None), allowed=padded[:, :, rows][..., columns])]

    return blocks


def _masks() -> list[Tensor]:
    causal = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril()
    left = torch.ones(2, 1, 1, _LENGTH, dtype=torch.bool)
    left[0, ..., :9] = False  # the first rows of this sample see nothing
    some = torch.rand(2, 1, _LENGTH, _LENGTH, generator=torch.Generator().manual_seed(4)) < 0.3
    return [causal.expand(2, 1, -1, -1), causal & left, some, torch.ones_like(some)]


@distributed(2)
def test_two_ranks() -> None:
    for allowed in _masks():
        _check(allowed)


@pytest.mark.slow
@distributed(3)
def test_three_ranks() -> None:
    for allowed in _masks():
        _check(allowed)


@distributed(2)
def test_sinks_take_weight_from_the_keys() -> None:
    """Also from those of rows that see nothing; their gradients are sums over the queries of all ranks."""
    axis = ZigzagSharding(dist.group.WORLD)
    sinks = torch.randn(_HEADS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for allowed in _masks():
        *inputs, grad = _whole()
        inputs = [x.requires_grad_() for x in (*inputs, sinks.clone())]
        query, key, value, logits = inputs
        key, value = (x.repeat_interleave(_HEADS // _KV_HEADS, 1) for x in (key, value))
        scores = (query @ key.transpose(-1, -2) * 0.4).masked_fill(~allowed, -torch.inf)
        scores = torch.cat([scores, logits[:, None, None].expand(2, -1, _LENGTH, 1)], -1)
        expected = scores.softmax(-1)[..., :-1] @ value
        expected.backward(grad)
        parts = [axis.take(x.detach(), 2).requires_grad_() for x in inputs[:3]] + [sinks.clone().requires_grad_()]
        found = ring_attention(*parts[:3], _blocks(axis, allowed), Softmax(0.4), axis.group, parts[3])
        found.backward(axis.take(grad, 2))
        dist.all_reduce(parts[3].grad)
        assert torch.allclose(found, axis.take(expected, 2), atol=1e-12)
        for part, whole in zip(parts, inputs, strict=True):
            assert torch.allclose(part.grad, whole.grad if part is parts[3] else axis.take(whole.grad, 2), atol=1e-12)


@pytest.mark.slow
@distributed(2)
def test_sixteen_bits() -> None:
    for allowed in _masks():
        _check(allowed, torch.bfloat16, 6e-2)


@distributed(2)
def test_gradients_with_dropout_are_those_of_what_was_kept() -> None:
    """Numerically: a backward pass that drops other weights than the forward pass would be far off."""
    axis = ZigzagSharding(dist.group.WORLD)
    query, key, value, _ = (axis.take(x, 2)[:1, :, :6].clone() for x in _whole())
    everything = [Block(slice(None), slice(None))]
    softmax = Softmax(0.4, dropout=0.3, seed=17)

    def total(step: float) -> Tensor:
        """All ranks move their values by so much, along ones."""
        found = ring_attention(query, key + step, value + step * value, lambda _: everything, softmax, axis.group)
        together = found.square().sum()
        dist.all_reduce(together)
        return together

    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    ring_attention(*inputs, lambda _: everything, softmax, axis.group).square().sum().backward()
    slope = inputs[1].grad.sum() + (inputs[2].grad * value).sum()
    dist.all_reduce(slope)
    numeric = (total(1e-6) - total(-1e-6)) / 2e-6
    assert torch.allclose(slope, numeric, rtol=1e-6)
    kept = ring_attention(query, key, torch.ones_like(value), lambda _: everything, softmax, axis.group)
    assert not torch.allclose(kept, torch.ones_like(kept)), "dropout drops nothing"


def test_blocks_of_a_softmax_are_put_together() -> None:
    query, key, value, _ = _whole()
    softmax = Softmax(_SIZE**-0.5)
    found, logs = attend(query, key[:, :, :5], value[:, :, :5], Block(slice(None), slice(None)), softmax)
    merge(found, logs, *attend(query, key[:, :, 5:], value[:, :, 5:], Block(slice(None), slice(None)), softmax))
    expected, _ = attend(query, key, value, Block(slice(None), slice(None)), softmax)
    assert torch.allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("dropout", [0.0, 1e-300])
def test_a_row_that_sees_nothing_finds_zero(dropout: float) -> None:
    """By torch's kernel and by the plain one, which runs where there is dropout."""
    query, key, value, _ = _whole()
    allowed = torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool)
    allowed[..., 2, :] = False
    found, logs = attend(
        query, key, value, Block(slice(None), slice(None), allowed=allowed), Softmax(0.3, dropout, seed=1)
    )
    assert found[:, :, 2].eq(0).all() and logs[:, :, 2].isneginf().all() and found.isfinite().all()


@pytest.mark.parametrize(("length", "size"), [(16, 2), (13, 2), (7, 4), (1, 3)])
def test_every_token_is_on_one_rank(length: int, size: int) -> None:
    axis = object.__new__(ZigzagSharding)
    axis.size = size
    held = torch.cat([axis.places(length, rank) for rank in range(size)])
    assert sorted(held.tolist()) == list(range(2 * size * axis.chunk(length)))
    assert held[axis.order(length)].tolist() == list(range(length))


def test_every_rank_has_as_many_scores_to_compute_under_a_causal_mask() -> None:
    axis = object.__new__(ZigzagSharding)
    axis.size = 4
    scores = {int((axis.places(64, rank) + 1).sum()) for rank in range(axis.size)}
    assert len(scores) == 1


def test_documents_are_told_by_positions_that_start_again() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1]])
    assert ContextParallelPass(None, 8, positions=positions).documents.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]


def test_a_gpu_is_not_waited_for_where_the_host_knows_the_batch() -> None:
    """The mask of each micro-batch, and the blocks of attention."""
    axis = object.__new__(ZigzagSharding)
    axis.size, axis.rank = 2, 0
    given = {"attention_mask": torch.ones(2, _LENGTH, dtype=torch.long)}
    given["attention_mask"][0, 0] = 0
    packed = torch.arange(_LENGTH).remainder(7)[None]
    with recorded_on_meta() as counts:
        ids, mask = (torch.ones(2, _LENGTH, dtype=torch.long, device="meta") for _ in range(2))
        record_facts([{"attention_mask": mask}], [given])
        cut_batch({"input_ids": ids, "attention_mask": mask}, axis, lambda _: None)
        of = axis.latest
        assert of.real is not None, "the host saw padding"
        blocks = ContextMask(of, causal_mask_function, 2, ids.device).blocks(0)
        positions = torch.empty(packed.shape, dtype=torch.long, device="meta")
        record_facts([{"position_ids": positions}], [{"position_ids": packed}])
        cut_batch({"input_ids": ids, "position_ids": positions}, axis, lambda _: None)
        blocks += ContextMask(axis.latest, causal_mask_function, 2, ids.device).blocks(0)
    assert blocks and all(block.allowed is None for block in blocks)
    assert not counts.syncs


def test_facts_are_those_of_each_part() -> None:
    masks = [torch.ones(2, 5, dtype=torch.long), torch.tensor([[1, 1, 1, 1, 0]])]
    parts = [{"attention_mask": mask.clone(), "position_ids": torch.arange(5)[None]} for mask in masks]
    parts[1]["position_ids"] = torch.tensor([[0, 1, 0, 1, 2]])
    record_facts(parts, [dict(part) for part in parts])
    assert [hides_nothing(part["attention_mask"]) for part in parts] == [True, False]
    assert [restarts(part["position_ids"]) for part in parts] == [False, True]
