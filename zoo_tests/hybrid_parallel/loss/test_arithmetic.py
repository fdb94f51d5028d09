"""The arithmetic of the loss: factors that cancel, and factors that must not.

What breaks here first: the gradient of a loss that has terms over all replicas and terms of one. Look in
`plugins/hybrid_parallel/loss/arithmetic.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from plugins.hybrid_parallel.loss.arithmetic import (
    SumOverReplicas,
    count_factor,
    gradient_factor,
    mean_over_replicas,
    norm_of,
    scaled,
)
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.toy import EXACT

SCALE = 2.0**12


@distributed(3)
def test_a_loss_may_have_terms_of_all_replicas_and_of_one() -> None:
    """The mean over replicas of (the global loss)² + a local mean, against its gradient by hand."""
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    factors = torch.tensor([0.2, 0.5, -1.1], dtype=torch.float64)
    own = factors[dist.get_rank()]
    loss = SumOverReplicas.apply(weight * own, dist.group.WORLD)
    torch.testing.assert_close(loss.detach(), 0.7 * factors.sum(), **EXACT)
    mean_over_replicas(loss.square() + 3.0 * own * weight, 3, SCALE).backward()
    gradient = weight.grad.clone()
    dist.all_reduce(gradient)  # as a bucket does
    expected = 2.0 * 0.7 * factors.sum().square() + 3.0 * factors.mean()
    torch.testing.assert_close(gradient / SCALE, expected, **EXACT)


@distributed(3)
def test_the_gradient_of_the_returned_loss_alone_is_exact() -> None:
    """1/3 times 3 is 1 in fp32: the two factors cost no bit."""
    weight = torch.tensor(0.7, requires_grad=True)
    mean_over_replicas(SumOverReplicas.apply(weight * 1.0, dist.group.WORLD), 3, SCALE).backward()
    assert weight.grad.item() == SCALE


def test_factor_of_a_count() -> None:
    rows, count, one, zero = (torch.tensor(value, dtype=torch.float64) for value in (8.0, 32.0, 1.0, 0.0))
    assert count_factor(rows, count, one) == 0.25
    assert count_factor(rows, zero, one) == 0.0, "nothing is counted"
    assert count_factor(rows, zero, zero) == 1.0, "the criterion returned a mean"


def test_gradients_are_unscaled_and_clipped_by_one_factor() -> None:
    norm = torch.tensor(4.0, dtype=torch.float64)
    assert gradient_factor(1.0, None, None) is None
    assert gradient_factor(SCALE, None, None) == 1.0 / SCALE
    assert gradient_factor(SCALE, norm, 1.0).item() == pytest.approx(0.25 / SCALE, rel=1e-6)
    assert gradient_factor(1.0, norm, 8.0) == 1.0, "a small norm is not scaled up"


def test_a_scale_of_one_adds_nothing_to_the_graph() -> None:
    share = torch.ones((), requires_grad=True)
    assert scaled(share, 1.0) is share and scaled(share, 2.0) == 2.0


_VALUES = {
    "gradients": lambda count: torch.randn(count) * 1e-3,
    "equal": lambda count: torch.full((count,), 1 / 3),
    "rows of a bias": lambda count: torch.randn(128).repeat(count // 128 + 1)[:count],
    "few": lambda count: torch.randn(count) * (torch.rand(count) < 1e-3),
    "one outlier": lambda count: torch.full((count,), 1e-3).index_fill_(0, torch.tensor([count // 2]), 1e4),
    "large": lambda count: torch.randn(count) * 1e20,
    "small": lambda count: torch.randn(count) * 1e-22,
    "zeros": torch.zeros,
}


@pytest.mark.parametrize("name", _VALUES)
def test_norms_keep_seven_digits(name: str) -> None:
    """Of 600,000 fp32 values, where those of torch on a CPU are up to 5e-4 off, or inf."""
    for count in (1, 130, 600_003):
        values = _VALUES[name](count)
        for norm_type in (2.0, 1.0, math.inf):
            expected = torch.linalg.vector_norm(values.double(), norm_type)
            found = norm_of(values, norm_type)
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=0.0)
    for broken in (math.nan, math.inf):
        values[-1] = broken
        assert not math.isfinite(norm_of(values))
