"""Schedules proved by a simulator: no deadlock, each micro-batch once, memory, and the shortest possible time.

What breaks here first: the order of actions or the depth of the warm-up. Look in
`plugins/hybrid_parallel/pipeline/schedule.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import Schedule1F1B

from plugins.hybrid_parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    forward_only,
    one_forward_one_backward,
)

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 20)]


@dataclass
class Simulation:
    """What executing a schedule showed.

    Attributes:
        ticks: time until the last action, a forward and a backward taking one tick each.
        peak: activations that were alive at once, by stage.
    """

    ticks: int
    peak: list[int]


def simulate(schedule: Schedule, num_stages: int, num_microbatches: int) -> Simulation:
    """Execute in lockstep; an action runs in a tick if what it needs was finished in an earlier one."""
    queues = [list(schedule(stage, num_stages, num_microbatches)) for stage in range(num_stages)]
    finished: set[tuple[int, Action]] = set()
    alive, peak, ticks = [0] * num_stages, [0] * num_stages, 0
    while any(queues):
        ready = [
            stage for stage, queue in enumerate(queues) if queue and _can_run(stage, num_stages, queue[0], finished)
        ]
        assert ready, f"deadlock at tick {ticks}: stages wait for {[str(queue[0]) for queue in queues if queue]}"
        for stage in ready:
            action = queues[stage].pop(0)
            finished.add((stage, action))
            alive[stage] += 1 if action.kind is Kind.FORWARD else -1
            peak[stage] = max(peak[stage], alive[stage])
        ticks += 1
    return Simulation(ticks, peak)


def _can_run(stage: int, num_stages: int, action: Action, finished: set[tuple[int, Action]]) -> bool:
    if action.kind is Kind.FORWARD:
        return stage == 0 or (stage - 1, action) in finished
    own_forward = (stage, Action(Kind.FORWARD, action.microbatch)) in finished
    return own_forward and (stage == num_stages - 1 or (stage + 1, action) in finished)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_each_micro_batch_goes_forward_then_backward_once(name: str) -> None:
    for p, m in SIZES:
        for stage in range(p):
            actions = list(SCHEDULES[name](stage, p, m))
            forwards = [action.microbatch for action in actions if action.kind is Kind.FORWARD]
            backwards = [action.microbatch for action in actions if action.kind is Kind.BACKWARD]
            assert forwards == backwards == list(range(m)), f"stage {stage} of {p}, {m} micro-batches"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_it_ends_in_the_shortest_time(name: str) -> None:
    """The first micro-batch takes 2p ticks, every other two more: 2(m + p - 1). A deadlock fails inside `simulate`."""
    for p, m in SIZES:
        assert simulate(SCHEDULES[name], p, m).ticks == 2 * (m + p - 1), f"{p} stages, {m} micro-batches"


def test_activations_alive_at_once() -> None:
    for p, m in SIZES:
        assert simulate(SCHEDULES["1f1b"], p, m).peak == [min(p - stage, m) for stage in range(p)]
        assert simulate(SCHEDULES["gpipe"], p, m).peak == [m] * p


def test_evaluation_only_goes_forward() -> None:
    for p, m in SIZES:
        assert simulate(forward_only, p, m).ticks == m + p - 1


def test_an_empty_batch_has_no_actions() -> None:
    for schedule in (*SCHEDULES.values(), forward_only):
        assert list(schedule(0, 4, 0)) == []


def test_1f1b_orders_the_same_actions_as_torch() -> None:
    for p, m in SIZES:
        for stage in range(p):
            actions = [str(action) for action in one_forward_one_backward(stage, p, m)]
            assert actions == _order_of_torch(stage, p, m), f"stage {stage} of {p}, {m} micro-batches"


def _order_of_torch(stage_index: int, num_stages: int, num_microbatches: int) -> list[str]:
    """What torch's schedule asks its stage to do. (Its `_get_pipeline_order` has another order on the last stage.)"""
    order: list[str] = []
    stage = MagicMock(stage_index=stage_index)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda index, *args, **kwargs: order.append(f"F{index}")
    stage.backward_one_chunk.side_effect = lambda index, *args, **kwargs: order.append(f"B{index}")
    schedule = MagicMock(_stage=stage, _num_stages=num_stages, _n_microbatches=num_microbatches)
    schedule._check_inputs.return_value = ([None] * num_microbatches, [None] * num_microbatches)
    Schedule1F1B._step_microbatches(schedule)
    return order
