"""Split-gather sequence parallelism, with lengths that the ranks do not divide.

What breaks here first: padding of the sequence, and partial gradients of what sees a slice of the tokens. Look in
`shardformer/distributed/sequence_parallel.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer import ShardSpec
from shardformer.distributed.sequence_parallel import SequenceParallel, gather_on_entry, wrap_layers
from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.shard_spec import annotate
from zoo_tests.harness.native import EXACT, check_gradients, fill, known
from zoo_tests.harness.ranks import distributed

LENGTHS = [1, 5, 8, 11]
HIDDEN = 6


def _slice(x: Tensor) -> Tensor:
    """This rank's tokens of [batch, seq, hidden]; padded at the end."""
    size = -(-x.shape[1] // dist.get_world_size())
    padded = nn.functional.pad(x, (0, 0, 0, size * dist.get_world_size() - x.shape[1]))
    return padded[:, dist.get_rank() * size : (dist.get_rank() + 1) * size]


@pytest.mark.parametrize("length", LENGTHS)
@distributed(4)
def test_enter_and_leave(length: int) -> None:
    region = SequenceParallel(dist.group.WORLD)
    x = known(2, length, HIDDEN, grad=True)
    inside = region.enter(x)
    torch.testing.assert_close(inside, _slice(x), **EXACT)
    weights = known(2, length, HIDDEN, seed=1)
    outside = region.leave(inside * 2)
    torch.testing.assert_close(outside, 2 * x, **EXACT)
    (outside * weights).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weights, **EXACT)


@pytest.mark.parametrize("length", LENGTHS)
@distributed(4)
def test_gather_and_reduce_scatter_are_each_others_gradient(length: int) -> None:
    """Each rank reads the gathered sequence with weights of its own; the partial sums are scattered."""
    region = SequenceParallel(dist.group.WORLD)
    region.length = length
    full = known(2, length, HIDDEN)
    own = known(4, 2, length, HIDDEN, seed=2)
    inside = _slice(full).clone().requires_grad_()
    gathered = region.gather(inside)
    torch.testing.assert_close(gathered, full, **EXACT)
    out = region.reduce_scatter(gathered * own[dist.get_rank()])
    torch.testing.assert_close(out, _slice(full * own.sum(0)), **EXACT)
    weights = known(2, length, HIDDEN, seed=3)
    (out * _slice(weights)).sum().backward()
    torch.testing.assert_close(inside.grad, _slice(weights * own.sum(0)), **EXACT)


class _Region(nn.Module):
    """A tensor-parallel region, called like the ones in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 7), nn.Linear(7, HIDDEN)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(hidden_states)))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), _Region()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.mlp(hidden_states=self.norm(hidden_states))


def _shard(layers: nn.Sequential) -> SequenceParallel:
    region = SequenceParallel(dist.group.WORLD)
    for layer in layers:
        mlp = layer.mlp
        mlp.up = ColumnParallelLinear.from_native_module(mlp.up, dist.group.WORLD, input_is_gathered=True)
        mlp.down = RowParallelLinear.from_native_module(mlp.down, dist.group.WORLD, sequence=region)
        for param in layer.norm.parameters():
            annotate(param, ShardSpec(tuple(param.shape)), dist.group.WORLD)
        gather_on_entry(mlp, region)
    wrap_layers(list(layers), region)
    return region


@pytest.mark.parametrize("recompute", [False, True])
@distributed(4)
def test_a_stack_of_layers(recompute: bool) -> None:
    """Passes of several lengths before their backward passes, as in a pipeline; norms and biases see a slice only."""
    native, layers = (fill(nn.Sequential(_Layer(), _Layer())) for _ in range(2))
    _shard(layers)
    inputs = [(known(2, n, HIDDEN, seed=n, grad=True), known(2, n, HIDDEN, seed=n, grad=True)) for n in LENGTHS]
    losses = []
    for x, plain_x in inputs:
        expected = native(plain_x)
        found = _run(layers, x, recompute)
        torch.testing.assert_close(found, expected, **EXACT)
        expected.square().sum().backward()
        losses.append(found.square().sum())
    for loss in losses:
        loss.backward()
    for x, plain_x in inputs:
        torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients(layers, native)


def _run(layers: nn.Sequential, x: Tensor, recompute: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    return x
