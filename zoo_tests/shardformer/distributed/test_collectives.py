"""Differentiable collectives: what each rank receives, and which gradient goes back.

What breaks here first: dims that the ranks do not divide, and exchanges whose backward pass is not their reverse. Look
in `shardformer/distributed/collectives.py`.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from shardformer.distributed.blocks import Blocks
from shardformer.distributed.collectives import (
    all_gather,
    all_to_all,
    all_to_all_uneven,
    gather_from_region,
    local_slice,
    reduce_scatter,
    split_to_region,
)
from shardformer.distributed.sequence_parallel import BlockedSequence
from zoo_tests.harness.native import EXACT, known
from zoo_tests.harness.ranks import distributed

_RANKS = 4


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", [3, 8])
@distributed(_RANKS)
def test_split_and_gather_along_any_dim(size: int, dim: int) -> None:
    shape = [5, 6, 7]
    shape[dim] = size
    x, weights = known(*shape, grad=True), known(*shape, seed=1)
    piece = split_to_region(x, dim, dist.group.WORLD)
    assert piece.shape[dim] == -(-size // _RANKS)
    whole = gather_from_region(piece, dim, dist.group.WORLD, size)
    torch.testing.assert_close(whole, x, **EXACT)
    (whole * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights, **EXACT)


@pytest.mark.parametrize("size", [3, 8])
@distributed(_RANKS)
def test_all_gather_and_reduce_scatter_are_each_others_gradient(size: int) -> None:
    group, own = dist.group.WORLD, known(_RANKS, 2, size, seed=2)
    x = local_slice(known(2, size), 1, group).requires_grad_()
    gathered = all_gather(x, 1, group, size)
    torch.testing.assert_close(gathered, known(2, size), **EXACT)
    partial = (gathered.detach() * own[dist.get_rank()]).requires_grad_()
    summed = reduce_scatter(partial, 1, group)
    torch.testing.assert_close(summed, local_slice(known(2, size) * own.sum(0), 1, group), **EXACT)
    gathered.backward(own[dist.get_rank()])
    torch.testing.assert_close(x.grad, local_slice(own.sum(0), 1, group), **EXACT)
    summed.backward(local_slice(own[0], 1, group))
    torch.testing.assert_close(partial.grad, own[0], **EXACT)


@distributed(_RANKS)
def test_models_may_change_what_they_get_in_place() -> None:
    """OLMoE clamps its gathered projections, routers with jitter scale hidden states; also where no copy is needed."""
    group, weights = dist.group.WORLD, known(20, 20, 20, seed=1)
    blocked = BlockedSequence(group, Blocks(2, range(2), sequence_count=2), is_cut=False)
    collectives = {
        "gather": lambda x, dim: gather_from_region(x, dim, group),
        "trimmed": lambda x, dim: gather_from_region(x, dim, group, _RANKS * x.shape[dim] - 1),
        "split": lambda x, dim: split_to_region(x, dim, group),
        "all-gather": lambda x, dim: all_gather(x, dim, group, _RANKS * x.shape[dim]),
        "reduce-scatter": lambda x, dim: reduce_scatter(x, dim, group),
        "blocks": lambda x, dim: blocked.gather(blocked.enter(x)),
    }
    for shape, dim, call in product(((4, 3, 5), (1, 3, 5), (1, 1, 2)), range(3), collectives.values()):
        x, twin = known(*shape, grad=True), known(*shape, grad=True)
        changed, plain = call(x * 1, dim).clamp_(-0.5, 0.5), call(twin * 1, dim).clamp(-0.5, 0.5)
        factor = weights[tuple(slice(size) for size in plain.shape)]
        (changed * factor).sum().backward()
        (plain * factor).sum().backward()
        torch.testing.assert_close(x.grad, twin.grad, **EXACT)


@distributed(_RANKS)
def test_all_to_all_exchanges_two_dims() -> None:
    whole, weights = known(2, 8, 12, 3), known(2, 8, 12, 3, seed=1)
    x = local_slice(whole, 2, dist.group.WORLD).requires_grad_()
    found = all_to_all(x, 1, 2, dist.group.WORLD)
    torch.testing.assert_close(found, local_slice(whole, 1, dist.group.WORLD), **EXACT)
    (found * local_slice(weights, 1, dist.group.WORLD)).sum().backward()
    torch.testing.assert_close(x.grad, local_slice(weights, 2, dist.group.WORLD), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(_RANKS)
def test_all_to_all_of_uneven_rows(dtype: torch.dtype) -> None:
    """Rank r sends r + s rows to rank s, each filled with 10 r + s; one of the counts is 0."""
    rank = dist.get_rank()
    sent, received = [rank + other for other in range(_RANKS)], [other + rank for other in range(_RANKS)]
    x = torch.tensor([10 * rank + s for s, n in enumerate(sent) for _ in range(n)], dtype=dtype)
    x = x[:, None].repeat(1, 2).requires_grad_()
    found = all_to_all_uneven(x, sent, received, dist.group.WORLD)
    assert found[:, 0].tolist() == [10 * r + rank for r, n in enumerate(received) for _ in range(n)]
    found.backward(torch.full_like(found, rank))
    assert x.grad[:, 1].tolist() == [s for s, n in enumerate(sent) for _ in range(n)]
