"""Sums that are the same bits in any order."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch

from plugins.hybrid_parallel.reproducible import reducer
from plugins.hybrid_parallel.reproducible.reducer import (
    add_multiples,
    from_multiples,
    largest,
    norm_of_parts,
    power_parts,
)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "_CHUNK", 50)


def _values(rows: int = 40, columns: int = 173) -> torch.Tensor:
    """Of very different magnitudes and both signs."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-24, 8, (rows, columns), generator=generator)
    return torch.ldexp(torch.randn(rows, columns, generator=generator), exponents)


def _sum(rows: torch.Tensor) -> torch.Tensor:
    sums = torch.full(rows.shape[1:], -7, dtype=torch.int64)  # to be overwritten
    for index, row in enumerate(rows):
        assert add_multiples(sums, row, begin=index == 0) == largest(row)
    return from_multiples(sums, torch.float32)


def test_the_order_of_summands_does_not_matter() -> None:
    values = _values()
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    in_turn = [reduce(torch.add, each.unbind()) for each in (values, values[order])]
    assert not torch.equal(*in_turn)  # in fp32 it does
    sums = [_sum(each) for each in (values, values[order])]
    assert torch.equal(*sums)
    exact = torch.tensor([math.fsum(column) for column in values.double().t().tolist()])
    torch.testing.assert_close(sums[0], exact.float(), rtol=2**-23, atol=len(values) * 2**-50)


def test_a_single_gradient_is_not_changed() -> None:
    values = torch.cat([_values().flatten(), torch.tensor([2.0**-26, -(2.0**-26) * 1.25, 0.0, 8191.5])])
    values = values[(values == 0) | (values.abs() >= 2.0**-26)]
    assert torch.equal(_sum(values[None]), values)


def test_zeros_take_part_and_what_is_not_finite_is_reported() -> None:
    values = _values(3, 173)
    values[0, :60], values[1, 40:], values[2] = 0, 0, 0  # whole chunks of zeros, first and later
    assert torch.equal(_sum(values), _sum(values.flip(0)))
    assert torch.equal(_sum(values)[:40], _sum(values[1:2])[:40])
    sums = torch.zeros(173, dtype=torch.int64)
    for broken in (math.nan, math.inf, -math.inf):
        for place in (0, 172):
            values[0, place] = broken
            assert not math.isfinite(add_multiples(sums, values[0], begin=False))
            values[0, place] = 0.5


def test_norms_of_parts_add_up_exactly() -> None:
    values = _values().flatten()
    for exponent in (2.0, 1.0, 0.5):
        whole = power_parts(values, exponent)
        for cut in (1, 7, 1000):
            parts = power_parts(values[:cut], exponent) + power_parts(values[cut:].flip(0), exponent)
            assert norm_of_parts(parts.tolist(), exponent) == norm_of_parts(whole.tolist(), exponent)
        expected = math.fsum(abs(value) ** exponent for value in values.double().tolist()) ** (1.0 / exponent)
        assert math.isclose(norm_of_parts(whole.tolist(), exponent), expected, rel_tol=1e-15)
        # As many equal parameters as make 10**12 values: models of more than 2**34 were beyond int64.
        times = 10**12 // values.numel()
        many = norm_of_parts((whole * times).tolist(), exponent)
        assert math.isclose(many, expected * times ** (1.0 / exponent), rel_tol=1e-15)
