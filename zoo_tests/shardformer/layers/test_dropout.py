"""Dropout: one mask for all ranks where activations are replicated, a mask a rank where they are cut.

What breaks here first: a stream that the ranks no longer share after one of them drew more numbers. Look in
`shardformer/distributed/random.py` and `shardformer/layers/norm.py`.
"""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.distributed.random import SharedStream, draw_per_rank
from shardformer.layers import ParallelDropout
from zoo_tests.harness.ranks import distributed


def _of_all_ranks(x: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x.contiguous())
    return gathered


def _all_equal(x: Tensor) -> bool:
    return all(torch.equal(x, other) for other in _of_all_ranks(x))


def _layers() -> tuple[nn.Dropout, ParallelDropout]:
    shared = nn.Dropout(0.5)
    return shared, ParallelDropout.from_native_module(shared, dist.group.WORLD)


@distributed(4)
def test_masks_are_shared_or_different_whatever_the_users_own_seed() -> None:
    shared, parallel = _layers()
    torch.manual_seed(dist.get_rank())
    stream, x = SharedStream(11), torch.ones(4, 50)
    with stream.active():
        masks = [layer(x) for layer in (shared, parallel, shared, parallel, shared)]
    for index in (0, 2, 4):
        assert _all_equal(masks[index]), "a sharded region in between must not move the shared stream"
    for index in (1, 3):
        of_ranks = _of_all_ranks(masks[index])
        assert not any(torch.equal(a, b) for i, a in enumerate(of_ranks) for b in of_ranks[:i])
    assert not torch.equal(masks[0], masks[2]) and not torch.equal(masks[1], masks[3])


@distributed(2)
def test_the_stream_goes_on_and_leaves_the_users_numbers_alone() -> None:
    shared, parallel = _layers()
    torch.manual_seed(5)
    expected = torch.rand(6)
    torch.manual_seed(5)
    stream, x = SharedStream(11), torch.ones(50)
    found = [torch.rand(3)]
    masks = []
    for _ in range(2):
        with stream.active():
            masks.append(shared(x))
            parallel(x)
    found.append(torch.rand(3))
    assert torch.equal(torch.cat(found), expected)
    assert not torch.equal(*masks), "the second pass draws other numbers than the first"


@distributed(2)
def test_generators_of_python_and_numpy_follow_the_stream_in_a_pass() -> None:
    """As SpecAugment and skipped layers need: tensor-parallel ranks whose own generators differ draw the same."""

    def drawn() -> list[float]:
        return [random.random(), *numpy.random.rand(3)]

    def seed() -> None:
        random.seed(dist.get_rank())
        numpy.random.seed(dist.get_rank())

    seed()
    own = [*drawn(), *drawn()]
    seed()
    stream, found, passes = SharedStream(11), drawn(), []
    for _ in range(2):
        with stream.of_pass():
            passes.append(torch.tensor(drawn()))
    assert found + drawn() == own, "the user's numbers go on"
    assert all(map(_all_equal, passes)) and not torch.equal(*passes)


@distributed(2)
def test_state_of_the_stream_is_restored() -> None:
    _, parallel = _layers()
    stream, x = SharedStream(11), torch.ones(50)
    state = stream.state_dict()
    with stream.active():
        first = parallel(x)
    stream.load_state_dict(state)
    with stream.active():
        assert torch.equal(parallel(x), first)


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(2)
def test_recomputation_draws_the_same_masks(reentrant: bool) -> None:
    """out = w * x * masks, so that the gradient of x, which needs the recomputed masks, times x is out again."""
    shared, parallel = _layers()
    weight = torch.full((200,), 3.0, requires_grad=True)
    x = torch.rand(200).add(1).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return parallel(shared(x * weight)) * weight

    with SharedStream(3).active():
        out = checkpoint(block, x, use_reentrant=reentrant)
        parallel(shared(torch.ones(10)))  # what comes after the block moves the stream on
        out.sum().backward()
    assert 0 < torch.count_nonzero(out) < 120
    torch.testing.assert_close(x.grad * x.detach(), out.detach())


@distributed(2)
def test_no_dropout_in_evaluation_or_with_probability_zero() -> None:
    x = torch.ones(50)
    state = torch.get_rng_state()
    for layer in _layers():
        assert torch.equal(layer.eval()(x), x)
    assert torch.equal(ParallelDropout(0.0, dist.get_rank())(x), x)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn for nothing"


@pytest.mark.parametrize("has_own_forward", [False, True])
def test_a_module_draws_per_rank_and_leaves_the_shared_stream_alone(has_own_forward: bool) -> None:
    def drawn(rank: int) -> tuple[Tensor, Tensor]:
        module = nn.Dropout(0.5)
        if has_own_forward:
            module.forward = lambda x: 3 * nn.functional.dropout(x, 0.5)
        layer = copy.deepcopy(draw_per_rank(module, rank))
        torch.manual_seed(5)
        return layer(torch.ones(40)), torch.rand(3)

    (first, after), (second, after_second) = drawn(0), drawn(1)
    assert torch.equal(first, drawn(0)[0]) and not torch.equal(first, second)
    assert torch.equal(after, after_second)
    assert first.max() == (6 if has_own_forward else 2)
