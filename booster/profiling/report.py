"""The launcher's part of a profile: a folder to write to, and one trace and one sentence at the end."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError
from booster.profiling.merge import RankTrace, merged


class JobProfile:
    """The profile of the ranks that this launcher starts.

    Args:
        num_steps: steps to trace.
        folder: receives `trace.json`, `memory.json`, and snapshots of GPUs; if there are several machines, names of
            files end with that of the machine.
        alone: whether all ranks run on this machine.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """

    def __init__(self, num_steps: int, folder: Path, alone: bool = True) -> None:
        self.num_steps, self.folder = num_steps, folder.absolute()
        self._suffix = "" if alone else f"-{socket.gethostname()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.scratch = Path(tempfile.mkdtemp(prefix=".ranks-", dir=self.folder))
        except OSError as error:
            raise ConfigurationError(
                f"--profile cannot write to {folder} ({error.strerror}); give another folder with --profile-output"
            ) from None

    def finish(self) -> str:
        """Merge what the ranks wrote; return one sentence for the user."""
        try:
            return self._merge()
        except (OSError, ValueError, KeyError) as error:
            return f"no profile was written: {error}"
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _merge(self) -> str:
        ranks: dict[int, dict[str, Any]] = {
            int(path.stem.removeprefix("rank")): json.loads(path.read_text(encoding="utf-8"))
            for path in self.scratch.glob("rank*.json")
            if path.stem.removeprefix("rank").isdecimal()
        }
        traced = {rank: found for rank, found in sorted(ranks.items()) if found["steps"]}
        if not ranks:
            return "no profile was written: the script gave no model with an optimizer to booster.boost"
        if not traced:
            return (
                f"no profile was written: the script ended before the first of the {self.num_steps} steps to profile, "
                "which follow a step of warm-up"
            )
        traces = [RankTrace.read(rank, self.scratch / found["trace"]) for rank, found in traced.items()]
        trace = self.folder / f"trace{self._suffix}.json"
        trace.write_text(json.dumps(merged(traces)), encoding="utf-8")
        memory = {"ranks": [{"rank": rank, **found["memory"]} for rank, found in traced.items()]}
        (self.folder / f"memory{self._suffix}.json").write_text(json.dumps(memory, indent=1) + "\n", encoding="utf-8")
        for snapshot in self.scratch.glob("rank*.pickle"):
            snapshot.replace(self.folder / f"memory_{snapshot.name}")
        steps = min(found["steps"] for found in traced.values())
        where = f"{trace}, and their memory in {self.folder / f'memory{self._suffix}.json'}"
        if steps < self.num_steps:
            return f"the script ended after {steps} of the {self.num_steps} steps to profile; they are in {where}"
        return f"the profile of {_counted(steps, 'step')} on {_counted(len(traced), 'rank')} is in {where}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
