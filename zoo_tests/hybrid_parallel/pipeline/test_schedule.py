"""Schedules proved by simulation: no deadlock, each pass once, the order of torch's own, memory, and their length.

What breaks here first: the order of actions or the depth of the warm-up. Look in
`plugins/hybrid_parallel/pipeline/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules as torchs

from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind
from plugins.hybrid_parallel.pipeline.timeline import Timeline, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (*range(1, 13), 16, 19)]
DURATIONS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def chunks_of(name: str) -> list[int]:
    return [2, 3, 4] if SCHEDULES[name].chunks is None else [SCHEDULES[name].chunks]


def cases(name: str) -> Iterator[tuple[int, int, int]]:
    yield from ((p, m, v) for p, m in SIZES for v in chunks_of(name))


def tables(name: str, p: int, m: int, v: int, trains: bool = True) -> list[list[Action]]:
    schedule = SCHEDULES[name]
    make = schedule.actions if trains else schedule.forward_only
    return [make(rank, p, m, v) for rank in range(p)]


def run(name: str, p: int, m: int, v: int = 1, trains: bool = True) -> Timeline:
    """Passes of a stage take 1 forward and 2 backward. A deadlock raises."""
    return simulate(tables(name, p, m, v, trains), lambda action: DURATIONS[action.kind])


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_micro_batch_passes_each_stage_once_each_way(name: str) -> None:
    for p, m, v in cases(name):
        for rank, actions in enumerate(tables(name, p, m, v)):
            stages = SCHEDULES[name].stages_of(rank, p, v)
            assert [SCHEDULES[name].rank_of(stage, p) for stage in stages] == [rank] * v
            for stage in stages:
                mine = [action for action in actions if action.stage == stage]
                forwards = [each.microbatch for each in mine if each.kind is Kind.FORWARD]
                backwards = [each.microbatch for each in mine if each.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
                halves = [each.microbatch for each in mine if each.kind is Kind.BACKWARD_INPUT]
                weights = [each.microbatch for each in mine if each.kind is Kind.BACKWARD_WEIGHT]
                # In the order of micro-batches: what travels between two stages is told apart by nothing else.
                assert forwards == backwards == list(range(m)), (p, m, v, rank)
                assert weights == halves, (p, m, v, rank)


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ranks_together_have_every_stage(name: str) -> None:
    for p in range(1, 9):
        for v in chunks_of(name):
            held = [stage for rank in range(p) for stage in SCHEDULES[name].stages_of(rank, p, v)]
            assert sorted(held) == list(range(p * v))


@pytest.mark.parametrize("name", SCHEDULES)
def test_nobody_waits_for_ever(name: str) -> None:
    for p, m, v in cases(name):
        run(name, p, m, v)
        run(name, p, m, v, trains=False)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_bubble_of_one_stage_a_rank(name: str) -> None:
    """p - 1 micro-batches' work (arXiv 2104.04473, section 2.2)."""
    for p, m, _ in cases(name):
        assert run(name, p, m).length == 3 * (m + p - 1), (p, m)


def test_bubble_of_interleaving() -> None:
    """p - 1 chunks' work, wherever the micro-batches go round evenly (arXiv 2104.04473, section 2.2.2)."""
    for p, m, v in cases("interleaved"):
        if m % p == 0:
            assert run("interleaved", p, m, v).length == 3 * (m * v + p - 1), (p, m, v)


def test_bubble_of_zero_bubble() -> None:
    """A third of that of interleaved 1F1B: (p - 1)(F + I - W) (arXiv 2401.10241, table 2)."""
    for p, m, v in cases("zero_bubble"):
        if m % p == 0 and m >= 2 * p:
            assert run("zero_bubble", p, m, v).length == 3 * m * v + p - 1, (p, m, v)


def test_bubble_of_zbv() -> None:
    """None but the way of the first micro-batch to the last stage and back (arXiv 2401.10241, section 6)."""
    for p, m, v in cases("zbv"):
        if m >= 2 * p:
            assert run("zbv", p, m, v).length == 6 * m + p - 1, (p, m)


def test_bubble_of_dualpipev() -> None:
    """As long as that of ZB-V, as passes of the two chunks do not overlap here."""
    for p, m, v in cases("dualpipev"):
        if m >= 2 * p and m % p == 0:
            assert run("dualpipev", p, m, v).length == 6 * m + p - 1, (p, m)


def test_the_better_schedules_are_better() -> None:
    lengths = {name: run(name, 4, 8, v).length / v
               for name, v in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2))}  # fmt: skip
    assert lengths == {"1f1b": 33.0, "interleaved": 28.5, "zero_bubble": 25.5, "zbv": 25.5}


def test_activations_alive_at_once() -> None:
    for p, m in SIZES:
        assert run("1f1b", p, m).peaks == [min(p - rank, m) for rank in range(p)]
        assert run("gpipe", p, m).peaks == [m] * p
        if m >= 2 * p and m % p == 0:  # in chunks
            assert max(run("interleaved", p, m, 3).peaks) == 3 * p + p - 1
            assert max(run("zero_bubble", p, m, 3).peaks) == 3 * p
            assert max(run("zbv", p, m, 2).peaks) == 2 * p
            assert max(run("dualpipev", p, m, 2).peaks) == 2 * p + 1


def test_evaluation_only_goes_forward() -> None:
    for p, m in SIZES:
        assert run("1f1b", p, m, trains=False).length == m + p - 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_empty_batch_has_no_actions(name: str) -> None:
    assert tables(name, 4, 0, chunks_of(name)[0]) == tables(name, 4, 0, chunks_of(name)[0], trains=False) == [[]] * 4


def test_the_simulator_sees_ranks_that_wait_for_each_other() -> None:
    forward, backward = (lambda stage: Action(Kind.FORWARD, stage, 0)), (lambda stage: Action(Kind.BACKWARD, stage, 0))
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait for each other, in front of \['0B0', '1B0'\]"):
        simulate([[forward(0), backward(0)], [backward(1), forward(1)]], lambda action: 1.0)


def test_messages_take_their_time() -> None:
    late = simulate(tables("1f1b", 2, 1, 1), lambda action: DURATIONS[action.kind], lambda source, target: 0.5)
    assert [[(str(timed.action), timed.begin) for timed in rank] for rank in late.ranks] == [
        [("0F0", 0.0), ("0B0", 5.0)],
        [("1F0", 1.5), ("1B0", 2.5)],
    ]
    assert late.bubbles == [4 / 7, 4 / 7]


# ----- torch's own schedules as the oracle -----


@pytest.mark.slow
def test_1f1b_orders_the_same_actions_as_torch() -> None:
    for p, m in SIZES:
        for rank, actions in enumerate(tables("1f1b", p, m, 1)):
            found = [f"{action.kind.value}{action.microbatch}" for action in actions]
            assert found == _torchs_1f1b(rank, p, m), f"rank {rank} of {p}, {m} micro-batches"


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev"])
def test_the_order_is_that_of_torch(name: str) -> None:
    compared = 0
    for p, m, v in cases(name):
        for rank, actions in enumerate(tables(name, p, m, v)):
            expected = _torchs_order(name, rank, p, m, v)
            if expected is not None:
                assert [str(action) for action in actions] == expected, f"rank {rank} of {p}, {m} micro-batches, {v}"
                compared += 1
    assert compared > 100


def _torchs_1f1b(stage_index: int, num_stages: int, num_microbatches: int) -> list[str]:
    """What torch's schedule asks its stage to do. (Its `_get_pipeline_order` has another order on the last stage.)"""
    order: list[str] = []
    stage = MagicMock(stage_index=stage_index)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda index, *args, **kwargs: order.append(f"F{index}")
    stage.backward_one_chunk.side_effect = lambda index, *args, **kwargs: order.append(f"B{index}")
    schedule = MagicMock(_stage=stage, _num_stages=num_stages, _n_microbatches=num_microbatches)
    schedule._check_inputs.return_value = ([None] * num_microbatches, [None] * num_microbatches)
    torchs.Schedule1F1B._step_microbatches(schedule)
    return order


def _torchs_order(name: str, rank: int, p: int, m: int, v: int) -> list[str] | None:
    """Torch's actions in our words, without its pauses; None where torch refuses the sizes."""
    rounds = max(1, m // p)
    this = SimpleNamespace(
        pp_group_size=p, _num_stages=p, num_stages=p * v, _n_microbatches=m, n_local_stages=v, rank=rank,
        number_of_rounds=rounds, microbatches_per_round=m // rounds,
    )  # fmt: skip
    if name == "gpipe":
        found = torchs.ScheduleGPipe._get_pipeline_order(this)[rank]
    else:
        if (name in ("interleaved", "zero_bubble") and m % rounds) or (name == "dualpipev" and m < 2 * p):
            return None
        cls = {
            "interleaved": torchs.ScheduleInterleaved1F1B,
            "zero_bubble": torchs.ScheduleInterleavedZeroBubble,
            "zbv": torchs.ScheduleZBVZeroBubble,
            "dualpipev": torchs.ScheduleDualPipeV,
        }[name]
        found = cls._calculate_single_rank_operations(this, rank)
    flat = [each for one in found if one is not None for each in (getattr(one, "sub_actions", None) or [one])]
    words = [f"{each.stage_index}{each.computation_type.value}{each.microbatch_index}" for each in flat]
    return [word for word in words if "REDUCE" not in word]
