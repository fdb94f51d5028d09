"""The leader's decisions, without processes: reports go in, decisions come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from booster.elastic.rendezvous import (
    DONE,
    END,
    FAILED,
    IDLE,
    LEFT,
    RUN,
    RUNNING,
    STOP,
    Decision,
    Leader,
    Limits,
    Report,
)

KILLED = 9


class Job:
    """Agents that do what the leader says."""

    def __init__(self, *places: int, **limits: Any) -> None:
        self.lines: list[str] = []
        self.leader = Leader(Limits(**{"min_ranks": 2, "max_ranks": 4, **limits}), self.lines.append)
        self.reports = {number: Report(places=each, all_places=each) for number, each in enumerate(places, 1)}
        self.now = 0.0

    def set(self, agent: int, **values: Any) -> None:
        self.reports[agent] = replace(self.reports[agent], **values)

    def decide(self, seconds: float = 0.1, silent: tuple[int, ...] = ()) -> Decision:
        """All agents but the silent ones report once more."""
        self.now += seconds
        for agent, report in self.reports.items():
            if agent not in silent:
                self.reports[agent] = replace(report, beat=report.beat + 1)
        return self.leader.decide(self.reports, self.now)

    def begin(self) -> Decision:
        """Let a round begin, and all of its members run."""
        decision = self.decide()
        assert decision.order == RUN
        for agent, _, _ in decision.members:
            self.set(agent, state=RUNNING, round=decision.round, busy=True, ended=[])
        return decision

    def stop(self, *agents: int) -> None:
        """Their ranks have ended."""
        for agent in agents:
            self.set(agent, busy=False)


def test_a_dead_rank_ends_the_round_and_the_rest_form_the_next() -> None:
    job = Job(2, 2)
    assert job.begin() == Decision(1, RUN, [[1, 0, 2], [2, 2, 2]])
    assert job.decide().order == RUN
    job.set(2, state=FAILED, ended=[[3, KILLED]], places=1)
    assert job.decide().order == STOP
    assert job.decide().order == STOP, "ranks still run"
    job.stop(1)
    assert job.decide().order == STOP, "a rank still runs"
    job.stop(2)
    assert job.begin() == Decision(2, RUN, [[1, 0, 2], [2, 2, 1]])
    assert job.lines == [
        "elastic: rank 3 was ended by SIGKILL",
        "elastic: round 2 begins with 3 ranks on 2 machines",
    ]


def test_a_lost_machine_is_waited_for_and_taken_in_when_it_is_back() -> None:
    job = Job(2, 2, lost_s=4.0)
    job.begin()
    job.set(1, state=FAILED, ended=[[0, 1 << 8]])  # an exception: its peer is gone
    job.stop(1)
    assert job.decide(silent=(2,)).order == STOP
    assert job.decide(2.0, silent=(2,)).order == STOP, "the machine may only be slow"
    assert job.decide(5.0, silent=(2,)).members == [[1, 0, 2]]
    job.set(1, state=RUNNING, round=2, busy=True, ended=[])
    assert not job.decide(silent=(2,)).leaves
    job.set(2, state=IDLE, busy=False)
    decision = job.decide()
    assert decision.leaves and decision.order == RUN
    job.set(1, state=LEFT)
    job.stop(1)
    assert job.begin() == Decision(3, RUN, [[1, 0, 2], [2, 2, 2]])


def test_a_place_is_filled_at_once_if_too_few_are_left() -> None:
    job = Job(4, min_ranks=4)
    job.begin()
    job.set(1, state=FAILED, ended=[[2, KILLED]], places=3)
    job.stop(1)
    assert job.begin().members == [[1, 0, 4]]


def test_the_first_round_waits_for_all_and_later_ones_do_not() -> None:
    job = Job(2, last_call_s=30.0)
    assert job.decide().order == STOP
    assert job.decide(29.0).order == STOP
    assert job.decide(2.0).members == [[1, 0, 2]]


def test_too_few_ranks_end_the_job_after_a_while() -> None:
    job = Job(1, join_s=60.0)
    assert job.decide(59.0).order == STOP
    decision = job.decide(62.0)
    assert (decision.order, decision.code) == (END, 1)
    assert decision.message == (
        "1 rank on 1 machine is there, fewer than --min-ranks 2, and no other has joined for 60 s; start more agents, "
        "or use --min-ranks 1"
    )


def test_a_mistake_of_the_script_ends_the_job() -> None:
    job = Job(2, 2)
    job.begin()
    job.set(1, state=FAILED, ended=[[0, 3 << 8]])
    job.decide()
    job.stop(1, 2)
    decision = job.decide()
    assert (decision.order, decision.code, decision.message) == (END, 3, "")


def test_an_exception_after_progress_is_tried_again_once() -> None:
    job = Job(4)
    for number, order in ((1, RUN), (2, END)):
        job.begin()
        job.set(1, state=FAILED, ended=[[0, 1 << 8]], progress=7)
        job.decide()
        job.stop(1)
        assert job.decide().order == order, number


def test_rounds_that_fail_without_progress_end_the_job() -> None:
    job = Job(4, max_restarts=2)
    for order in (RUN, RUN, END):
        job.begin()
        job.set(1, state=FAILED, ended=[[1, KILLED]])
        job.decide()
        job.stop(1)
        decision = job.decide()
        assert decision.order == order
    assert decision.code == 128 + KILLED and "--max-restarts" in decision.message


def test_a_limit_of_the_layouts_holds_until_there_are_more_ranks() -> None:
    job = Job(3, 1)
    job.reports[2] = replace(job.reports[2], places=0)
    job.leader.limits = replace(job.leader.limits, last_call_s=0.0)
    assert job.begin().world_size == 3
    job.set(1, state=LEFT, limit=2)
    job.stop(1)
    assert job.decide().order == RUN
    assert job.begin().world_size == 2
    assert not job.decide().leaves, "the third rank would leave again"
    job.set(2, places=1)
    assert job.decide().leaves


def test_all_done_is_the_end() -> None:
    job = Job(2, 2)
    job.begin()
    job.set(1, state=DONE)
    assert job.decide().order == RUN
    job.set(2, state=DONE)
    assert (job.decide().order, job.leader.decision.code) == (END, 0)


def test_a_new_leader_goes_on_with_the_rounds_of_the_last_one() -> None:
    job = Job(2, 2)
    for agent in (1, 2):
        job.set(agent, state=IDLE, round=5)
    assert job.begin().round == 6
