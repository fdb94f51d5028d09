"""What agents and their leader tell each other: reports of agents, and the leader's decision for all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

IDLE, RUNNING, FAILED, LEFT, DONE = "idle", "running", "failed", "left", "done"
RUN, STOP, END = "run", "stop", "end"


@dataclass(frozen=True)
class Report:
    """State of an agent.

    Attributes:
        beat: grows with each report.
        host: name of the machine, for people.
        places: number of ranks that it can start now.
        all_places: the same, with places whose rank has died a short time ago.
        state: "idle", "running", "failed" (a rank has), "left" (all ranks have, at a step boundary) or "done".
        round: round that the state is about.
        busy: whether ranks of it still run.
        ended: [rank, wait status] of its ranks that failed in that round.
        progress: number of the newest snapshot on the machine.
        limit: how many ranks at most a rank has asked for in that round.
    """

    beat: int = 0
    host: str = ""
    places: int = 0
    all_places: int = 0
    state: str = IDLE
    round: int = 0
    busy: bool = False
    ended: list[list[int]] = field(default_factory=list)
    progress: int = 0
    limit: int | None = None

    def to_json(self) -> str:
        """Return the text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read a text of the store."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Decision:
    """What the leader wants all agents to do.

    Attributes:
        round: number of the round, from 1; 0 before the first.
        order: "run" the round, "stop" its ranks, or "end" the job.
        members: [agent, first rank, number of ranks] of each machine of the round.
        leaves: whether the round is to end at its next step boundary, because others want to join.
        code: exit code of the job that ends.
        message: why it ends; "" if the ranks have said it, or it was a success.
    """

    round: int = 0
    order: str = STOP
    members: list[list[int]] = field(default_factory=list)
    leaves: bool = False
    code: int = 0
    message: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks of the round."""
        return sum(count for _, _, count in self.members)

    def to_json(self) -> str:
        """Return the text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Decision:
        """Read a text of the store."""
        return cls(**json.loads(text))
