"""Runs under failures: the closed form against a simulation, the interval between checkpoints, ways to recover.

What breaks here first: work that counts although it is repeated, or a kind of time that no share has.
"""

from __future__ import annotations

from math import exp
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.failure_simulation import (
    RECOVERIES,
    Costs,
    Failures,
    goodput,
    interval_of,
    recovery_seconds,
    shares,
)
from benchmarks.failure_simulation import goodputs as simulated
from plugins.hybrid_parallel.planner.costs import Prediction
from plugins.hybrid_parallel.planner.device import preset
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.report import (
    FailureAssumptions,
    best_interval,
    goodput_text,
    goodputs,
    speed_of,
)

DISK, SPARES, SHRINKS = RECOVERIES
COSTS = Costs(step=20.0, save=30.0, load=200.0, copy=1.0, fetch=5.0)
FAILURES = Failures(machines=100, mean_uptime=100 * 3600.0)


def everything(working: int) -> float:
    return 1.0


@pytest.mark.parametrize("interval", [100.0, 500.0, 4000.0])
def test_restart_from_disk_is_the_closed_form(interval: float) -> None:
    """Daly (2006), equation 13: the mean time of a cycle with failures in training, saving and recovery."""
    mean, recovery = FAILURES.between, recovery_seconds(DISK, COSTS)
    cycle = exp(recovery / mean) * mean * (exp((interval + COSTS.save) / mean) - 1)
    result = goodput(DISK, COSTS, FAILURES, everything, interval)
    assert result.useful == pytest.approx(interval / cycle, rel=1e-2)
    assert sum(shares(result).values()) == pytest.approx(1)


def test_the_best_interval_is_best() -> None:
    best = interval_of(DISK, COSTS, FAILURES)
    assert best == best_interval(COSTS.save, FAILURES.between) == pytest.approx(445, abs=1)
    for factor in (0.4, 2.5):
        assert goodput(DISK, COSTS, FAILURES, everything, factor * best).useful < (
            goodput(DISK, COSTS, FAILURES, everything).useful - 0.01
        )
    assert best_interval(3.0, 1.0) == 1.0  # failures are more frequent than checkpoints could be


def test_copies_lose_half_a_step_for_each_failure() -> None:
    result = goodput(SPARES, COSTS, FAILURES, everything, interval=500.0)
    assert result.lost == pytest.approx(COSTS.step / 2 / FAILURES.between, rel=0.1)
    assert result.saving == pytest.approx((COSTS.save / 530 + COSTS.copy / 21) * (1 - result.recovering), rel=0.05)
    assert interval_of(SPARES, COSTS, FAILURES) > 10 * interval_of(DISK, COSTS, FAILURES)


def test_a_machine_and_its_neighbour_fall_back_to_the_disk() -> None:
    pair = Failures(machines=2, mean_uptime=7200.0)
    lost_with_copies = goodput(SPARES, COSTS, pair, everything, interval=1000.0).lost
    half_steps = COSTS.step / 2 / pair.between
    assert lost_with_copies > 1.5 * half_steps


def test_fewer_replicas_train_until_machines_are_back() -> None:
    layout = Layout(dp_size=4, tp_size=8, pp_size=4, num_microbatches=6)
    speed = speed_of(layout, preset("H100"))
    # Three replicas of 4 machines run 8 micro-batches each, where four ran 6; 3 passes fill the pipeline.
    assert [speed(working) for working in (16, 15, 12, 11, 3)] == [1.0, 9 / 11, 9 / 11, 9 / 15, 0.0]
    failures = Failures(machines=16, mean_uptime=16 * 40000.0, repair=4000.0)
    result = goodput(SHRINKS, COSTS, failures, speed)
    assert result.fewer == pytest.approx((1 - 9 / 11) * 0.1, rel=0.3)  # a machine is missing in a tenth of the time
    assert sum(shares(result).values()) == pytest.approx(1)


@pytest.mark.parametrize("device_hours", [300.0, 1000.0, 50_000.0])
def test_the_closed_form_is_the_mean_of_simulated_runs(device_hours: float) -> None:
    layout = Layout(dp_size=16, tp_size=8, pp_size=4, num_microbatches=6)
    seconds = SimpleNamespace(total=20.0)
    memory = SimpleNamespace(parameters=2e9, optimizer=1e9, host=0.0)
    prediction = cast(Prediction, SimpleNamespace(layout=layout, seconds=seconds, memory=memory))
    assumed = FailureAssumptions(device_hours, storage=0.12e9, start=300.0, repair_hours=1.0)
    expected = simulated(prediction, preset("H100"), assumed)
    found = goodputs(prediction, preset("H100"), assumed)
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert each.useful == pytest.approx(expected[name].useful, abs=0.02), name
    assert "restart from disk" in goodput_text(found, 64, 3600.0)


def test_machines_that_fail_all_the_time_train_nothing() -> None:
    prediction = SimpleNamespace(
        layout=Layout(dp_size=4096, tp_size=8, pp_size=1),
        seconds=SimpleNamespace(total=20.0),
        memory=SimpleNamespace(parameters=2e9, optimizer=1e9, host=0.0),
    )
    assumed = FailureAssumptions(0.01, storage=1e6, start=300.0, repair_hours=1000.0)
    assert all(
        0 <= each.useful < 1e-3 for each in goodputs(cast(Prediction, prediction), preset("H100"), assumed).values()
    )
