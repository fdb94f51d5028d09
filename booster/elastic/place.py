"""What a rank of an elastic job knows of it, and what ranks and their agent tell each other through files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Environment variable of a rank: an `ElasticPlace` as JSON.
VARIABLE = "BOOSTER_ELASTIC"
_LEAVE, _LIMIT, _MODULES, _PIECES, _FOLDER = "leave", "limit", "modules.json", "pieces", "folder"


@dataclass(frozen=True)
class ElasticPlace:
    """Place of a rank in an elastic job.

    Attributes:
        memory: directory in the memory of this machine, which outlives the rank.
        min_ranks, max_ranks: number of ranks that the job may have.
        round: number of the round, from 1.
        events: file to which times of events are appended; "" for none.
    """

    memory: str
    min_ranks: int
    max_ranks: int
    round: int
    events: str = ""

    def to_json(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ElasticPlace:
        """Read the value of the environment variable."""
        return cls(**json.loads(text))

    @property
    def pieces(self) -> Path:
        """Directory of the pieces of snapshots on this machine."""
        return Path(self.memory) / _PIECES

    def note(self, event: str, **values: Any) -> None:
        """Append the time of an event to the file of events."""
        note(self.events, event, round=self.round, **values)

    def is_asked_to_leave(self) -> bool:
        """Return whether this round is to end at the next step boundary."""
        return (Path(self.memory) / f"{_LEAVE}-{self.round}").exists()

    def ask_to_leave(self) -> None:
        """Have this round end at the next step boundary; the agent calls this."""
        (Path(self.memory) / f"{_LEAVE}-{self.round}").touch()

    def set_limit(self, num_ranks: int) -> None:
        """Ask for rounds of at most this many ranks while there are no more than now."""
        write_at_once(Path(self.memory) / f"{_LIMIT}-{self.round}", str(num_ranks))

    def limit(self) -> int | None:
        """Return the limit that a rank of this round has set."""
        path = Path(self.memory) / f"{_LIMIT}-{self.round}"
        return int(path.read_text()) if path.exists() else None

    def tell_modules(self, names: Iterator[str]) -> None:
        """Tell the fork server which modules ranks import."""
        path = Path(self.memory) / _MODULES
        if not path.exists():
            write_at_once(path, json.dumps(list(names)))

    def modules(self) -> list[str]:
        """Return the modules that ranks import; none before a rank has told."""
        path = Path(self.memory) / _MODULES
        return json.loads(path.read_text()) if path.exists() else []

    def set_folder(self, folder: Path) -> None:
        """Say where on disk the state is to be kept if the job cannot go on."""
        path = Path(self.memory) / _FOLDER
        if not path.exists() or path.read_text() != str(folder):
            write_at_once(path, str(folder))

    def folder(self) -> Path | None:
        """Return where on disk the state is to be kept; None before a rank has said it."""
        path = Path(self.memory) / _FOLDER
        return Path(path.read_text()) if path.exists() else None


def write_at_once(path: Path, text: str) -> None:
    """Write a file that readers see complete or not at all."""
    hidden = path.with_name(f".{path.name}-{os.getpid()}")
    hidden.write_text(text, encoding="utf-8")
    hidden.rename(path)


def note(path: str, event: str, **values: Any) -> None:
    """Append the wall-clock time of an event to a file of JSON lines; nothing without a path."""
    if path:
        line = json.dumps({"time": time.time(), "event": event, **values}) + "\n"
        with open(path, "ab", buffering=0) as file:
            file.write(line.encode())  # in one call, so that lines of several processes do not mix
