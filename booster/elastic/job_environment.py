"""What a rank of an elastic job knows of it, and what ranks and their agent tell each other through files.

A round has a name (`agree_on_round`) that all of its ranks have and no earlier round had: torchrun keeps one store for
all rounds of a job, with the keys of ranks that are gone. `TORCHELASTIC_RESTART_COUNT` does not tell rounds apart: an
agent counts the failures of its own ranks alone, and machines that join or leave are no failures at all.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

VARIABLE = "BOOSTER_ELASTIC"  # environment variable of a rank: an `ElasticPlace` as JSON
# Names of what ranks and their agent tell each other: that the ranks are to leave at the next step boundary; how many
# ranks the next round may have at most; modules that ranks import; where the state is kept if the job cannot go on.
LEAVE, LIMIT, MODULES, FOLDER = "leave", "limit", "modules", "folder"
_OF_ROUND = (LEAVE, LIMIT)  # the others last as long as the job
_PIECES = "pieces"


class Message:
    """Base of dataclasses of plain values that are sent as JSON."""

    def to_json(self) -> str:
        """Return the text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read the text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class ElasticPlace(Message):
    """Place of a rank in an elastic job."""

    memory: str  # directory in the memory of this machine, which outlives the rank
    min_ranks: int
    max_ranks: int
    round: int  # number of the round, from 1
    events: str = ""  # file to which times of events are appended; "" for none

    @property
    def pieces(self) -> Path:
        """Directory of the pieces of snapshots on this machine."""
        return Path(self.memory) / _PIECES

    def note(self, event: str, **values: Any) -> None:
        """Append the time of an event to the file of events."""
        note(self.events, event, round=self.round, **values)

    def put(self, name: str, value: Any) -> None:
        """Write a value for the ranks of this machine and their agent, who see it complete or not at all."""
        path = self._path(name)
        hidden = path.with_name(f".{path.name}-{os.getpid()}")
        hidden.write_text(json.dumps(value), encoding="utf-8")
        hidden.rename(path)

    def get(self, name: str) -> Any:
        """Return the value that was written last; None without one."""
        path = self._path(name)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _path(self, name: str) -> Path:
        return Path(self.memory) / (f"{name}-{self.round}" if name in _OF_ROUND else name)


def note(path: str, event: str, **values: Any) -> None:
    """Append the wall-clock time of an event to a file of JSON lines; nothing without a path."""
    if path:
        line = json.dumps({"time": time.time(), "event": event, **values}) + "\n"
        with open(path, "ab", buffering=0) as file:
            file.write(line.encode())  # in one call, so that lines of several processes do not mix


_POLL_S = 0.05


def agree_on_round(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Return the name that rank 0 has given this round; all ranks of the round must call this.

    Each rank asks with a new number, so that an answer to an earlier holder of its rank is none to it.

    Raises:
        TimeoutError: a rank did not join within `timeout_s` seconds.
    """
    if rank == 0:
        return _answer(store, world_size, timeout_s)
    number = uuid.uuid4().hex
    store.set(f"asks/{rank}", number)
    answer = f"answer/{rank}/{number}"
    try:
        store.wait([answer], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        raise TimeoutError(
            f"rank 0 did not join the job within timeout_s={timeout_s:g}; look at why, or give a longer time in "
            "launch_from_torch(timeout_s=...)"
        ) from None
    name = store.get(answer).decode()
    store.add(f"{name}/has_it", 1)
    return name


def _answer(store: dist.Store, world_size: int, timeout_s: float) -> str:
    """Answer all ranks, some of them more than once: the first number may be that of a rank that is gone."""
    name = uuid.uuid4().hex
    asks = [f"asks/{rank}" for rank in range(1, world_size)]
    answered: dict[int, str] = {}
    until = time.monotonic() + timeout_s
    while (num_ready := store.add(f"{name}/has_it", 0)) < world_size - 1:
        if time.monotonic() > until:
            raise TimeoutError(
                f"{world_size - 1 - num_ready} of {world_size} ranks did not join the job within "
                f"timeout_s={timeout_s:g}; look at why, or give a longer time in launch_from_torch(timeout_s=...)"
            )
        if store.check(asks):
            numbers = dict(enumerate((number.decode() for number in store.multi_get(asks)), start=1))
            fresh = {rank: number for rank, number in numbers.items() if answered.get(rank) != number}
            if fresh:
                store.multi_set([f"answer/{rank}/{number}" for rank, number in fresh.items()], [name] * len(fresh))
            answered |= fresh
        time.sleep(_POLL_S)
    return name
