"""What the tests of layers share: inputs that all ranks know, and gradients cut like their parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardformer import spec_of
from shardformer.shard_spec import grad_group_of

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def known(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    """Random fp64 numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def fill(module: nn.Module) -> nn.Module:
    """The module in fp64 with the same numbers on every rank, biases included."""
    module.double()
    with torch.no_grad():
        for seed, param in enumerate(module.parameters()):
            param.copy_(known(*param.shape, seed=seed + 100))
    return module


def check_gradients(sharded: nn.Module, native: nn.Module) -> None:
    """Every parameter's gradient is its piece of the native one, by name; padding has none."""
    expected = dict(native.named_parameters())
    found = dict(sharded.named_parameters())
    assert set(found) == set(expected)
    for name, param in found.items():
        gradient = param.grad.clone()
        if grad_group_of(param) is not None:
            dist.all_reduce(gradient, group=grad_group_of(param))
        torch.testing.assert_close(
            gradient, spec_of(param).shard(expected[name].grad), **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


def cut_features(x: Tensor, weight: Tensor, weight_dim: int = 0) -> Tensor:
    """This rank's features (last dim) of `x`, which are cut like `weight_dim` of a parallel layer's weight."""
    pieces = weight.shard_spec.pieces()
    return torch.cat([x[..., start:stop] for start, stop, _ in pieces], dim=-1)
