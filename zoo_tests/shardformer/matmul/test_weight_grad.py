"""Gradients of matrices that products and lookups write straight into buckets.

What breaks here first: a gradient that is added twice, or whose place a second use of the parameter overwrites. Look in
`shardformer/matmul/kernel.py` and `Bucket.borrow_grad_view`.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.zero.bucket import Bucket
from zoo_tests.harness.ranks import run_on_ranks


class Reader(nn.Module):
    """Every use that a matrix is put to: twice, tied, transposed, by index with a padding row, by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8, padding_idx=3)
        self.twice, self.once = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.conv, self.unused = Conv1D(8, 8), nn.Linear(8, 8)
        self.functional = nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.twice(self.twice(x).relu_())
        x = self.conv(self.once(x)) @ self.functional
        return F.linear(x, self.table.weight)  # a tied head, by hand


class Counted(nn.Module):
    """The loss of a batch is a mean; each replica has as many samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader = Reader().double()

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.reader(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def _ids(rank: int, step: int) -> Tensor:
    return torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def _penalty(model: nn.Module, ids: Tensor, table: Tensor) -> Tensor:
    """A loss of a gradient: what the backward pass computes is differentiated again."""
    (grad,) = torch.autograd.grad(model(ids), table, create_graph=True)
    return grad.square().sum()


def _plain(ranks: int, passes: int, penalized: bool) -> dict[str, Tensor]:
    model = Counted()
    for rank in range(ranks):
        for step in range(passes):
            loss = model(_ids(rank, step))
            if penalized:
                loss = loss + _penalty(model, _ids(rank, step), model.reader.once.weight)
            (loss / ranks).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _boosted(passes: int, penalized: bool, hooked: bool) -> tuple[dict[str, Tensor], int, list[Tensor]]:
    copies, seen = [], []
    accumulate = Bucket.accumulate

    def counted(self: Bucket, index: int, grad: Tensor, **kwargs: bool) -> None:
        was_lent = index in self._lent
        accumulate(self, index, grad, **kwargs)
        if self.params[index].dim() == 2 and not (was_lent and grad.data_ptr() == self._grad_view(index).data_ptr()):
            copies.append(self.params[index])

    model = Counted()
    booster = Booster(plugin=HybridParallelPlugin(zero_bucket_size_in_mb=0.002))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    own = model.unwrap()
    if hooked:
        Tensor.register_hook(own.reader.once.weight, lambda grad: seen.append(grad.clone()))
    with mock.patch.object(Bucket, "accumulate", counted):
        for step in range(passes):
            ids = _ids(dist.get_rank(), step)
            loss = model(ids)
            if penalized:
                loss = loss + _penalty(model, ids, own.reader.once.weight)
            with contextlib.nullcontext() if step == passes - 1 else booster.no_sync(model, optimizer):
                booster.backward(loss, optimizer)
    return optimizer.full_gradients(), len(copies), seen


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("penalized", [False, True])
def test_gradients_are_those_of_plain_torch(passes: int, penalized: bool) -> None:
    expected = _plain(2, passes, penalized)
    for grads, _, _ in run_on_ranks(2, _boosted, passes, penalized, False):
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14, msg=name)


def test_products_and_lookups_write_to_the_bucket() -> None:
    # What is copied: `twice` and `table`, whose two gradients autograd adds up, and `functional`, which is no layer's.
    for _, copies, _ in run_on_ranks(2, _boosted, 1, False, False):
        assert copies <= 3


def test_a_hook_sees_the_gradient_of_its_pass() -> None:
    whole = _plain(1, 1, False)
    for rank, (_, _, seen) in enumerate(run_on_ranks(2, _boosted, 3, False, True)):
        assert len(seen) == 3
        if rank == 0:
            torch.testing.assert_close(seen[0] * 2, whole["reader.once.weight"], rtol=1e-12, atol=1e-14)
