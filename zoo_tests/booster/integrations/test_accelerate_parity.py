"""accelerate's loop under a layout trains as accelerate's own `Accelerator` does in one process.

What breaks here first: a schedule that steps as often as there are ranks, or gradients of an incomplete group of
accumulated batches. Look in `booster/integrations/accelerate.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from zoo_tests.booster.integrations.accelerate_loop import LAYOUTS, Job, Record, boosted, plain
from zoo_tests.harness.ranks import run_on_ranks

_EXACT = replace(Job(), dtype=torch.float64)
_ADAM = replace(_EXACT, optimizer=torch.optim.AdamW, options=(("lr", 2e-3), ("weight_decay", 0.1)))
_LONG = {"epochs": 10, "accumulate": 1}  # 50 steps
_JOBS = {
    "fp32": replace(Job(), **_LONG),
    "fp64": replace(_EXACT, **_LONG),
    "adamw": replace(_ADAM, **_LONG),
    "accumulated": replace(_EXACT, epochs=17),  # 51 steps of two batches, the last one of an epoch of one
    "clipped by value": replace(_EXACT, **_LONG, max_norm=None, max_value=1e-3),
}


@cache
def _reference(job: str | Job, replicas: int) -> Record:
    torch.set_num_threads(1)
    return plain(_JOBS[job] if isinstance(job, str) else job, replicas)


def worst_difference(found: Record, expected: Record) -> float:
    """The largest absolute difference of what both have left behind."""
    pairs = [
        *zip(found.losses, expected.losses, strict=True),
        *zip(found.rates, expected.rates, strict=True),
        *zip(found.norms, expected.norms, strict=True),
        (found.drawn, expected.drawn),
    ]
    tensors = [(found.weights[name], value) for name, value in expected.weights.items()]
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        assert torch.equal(one[1], other[1]), "labels, in the order of the dataset, each once"
        tensors.append((one[0], other[0]))
    assert found.synced == expected.synced and set(found.weights) == set(expected.weights)
    differences = [abs(one - other) for one, other in pairs]
    differences += [float((one - other).abs().max()) for one, other in tensors]
    return float(torch.tensor(differences, dtype=torch.float64).max())  # which is nan if one of them is


def _compare(layout: str, job: Job, expected: Record) -> float:
    records = run_on_ranks(LAYOUTS[layout][0], boosted, job, layout)
    assert len({tuple(each.losses) for each in records}) == 1, "all ranks tell the same"
    worst = [worst_difference(each, expected) for each in records]
    return float(torch.tensor(worst, dtype=torch.float64).max())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process(layout: str) -> None:
    replicas = 2 if layout == "dp2" else 1
    expected = _reference(_EXACT, replicas)
    assert expected.synced == [False, True, False, True, True] * 2 and len(expected.norms) == 6
    assert expected.losses[0] != expected.losses[5] and min(expected.norms) < 0.3 < max(expected.norms)
    assert _compare(layout, _EXACT, expected) < 1e-9


@pytest.mark.campaign
@pytest.mark.parametrize("name", _JOBS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_steps(layout: str, name: str) -> None:
    worst = _compare(layout, _JOBS[name], _reference(name, 2 if layout == "dp2" else 1))
    print(f"{layout}, {name}: {worst:.1e}")
    assert worst < (1e-6 if name == "fp32" else 1e-9)
