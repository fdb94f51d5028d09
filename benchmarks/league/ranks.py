"""Ranks that judge one class after the other; they start again after a crash, a hang, or an error on one of them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.league.outcome import CRASHED, HUNG, REFUSED, WRONG, Outcome

_START_S = 900.0
_GRACE_S = 20.0  # for the others, once a rank has failed: a launcher would end them
_ENDING = (REFUSED, CRASHED)


class Ranks:
    """Processes for systems that share an environment.

    Args:
        world_size: number of ranks.
        path: folder that comes first on the path of imports: the environment of the systems; None for the present one.
        timeout_s: after which ranks that do not answer have hung.
    """

    def __init__(self, world_size: int, path: Path | None, timeout_s: float) -> None:
        self.world_size, self.path, self.timeout_s = world_size, path, timeout_s
        self._processes: list[subprocess.Popen[str]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def judge(self, system: str, family: str, name: str, tp_size: int, pp_size: int) -> Outcome:
        """Judge a class on all ranks; the worst of their outcomes counts.

        What is wrong, crashed or hung after another class, or hung once, is judged again on ranks that have just
        started: it may be the fault of what ran before, or of a machine that does something else, too.
        """
        is_fresh = not self._processes
        found = self._judge_once(system, family, name, tp_size, pp_size)
        if found.kind == HUNG or (found.kind in (WRONG, CRASHED) and not is_fresh and "fault" not in system):
            self.stop()
            found = self._judge_once(system, family, name, tp_size, pp_size)
        return found

    def _judge_once(self, system: str, family: str, name: str, tp_size: int, pp_size: int) -> Outcome:
        if not self._processes:
            self._start()
            if len(self._answers(_START_S)) < self.world_size:
                self.stop()
                raise RuntimeError("the ranks do not start")
        task = json.dumps([system, family, name, tp_size, pp_size]) + "\n"
        try:
            for process in self._processes:
                process.stdin.write(task)
                process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            return Outcome(CRASHED, "a rank ended")
        answers = self._answers(self.timeout_s)
        failed = [each for each in (Outcome(*json.loads(answer)) for answer in answers) if each.kind in _ENDING]
        if len(answers) < self.world_size and failed:
            self.stop()  # the others wait for it
            return failed[0]
        if len(answers) < self.world_size:
            ended = any(process.poll() is not None for process in self._processes)
            self.stop()
            return Outcome(CRASHED, "a rank ended") if ended else Outcome(HUNG, f"no answer in {self.timeout_s:.0f} s")
        found = [Outcome(*json.loads(answer)) for answer in answers]
        if len({each.kind for each in found}) > 1 or found[0].kind == CRASHED:
            self.stop()  # collectives of one rank may be left over
        return next((each for each in found if each.kind != found[0].kind and each.kind != "exact"), found[0])

    def stop(self) -> None:
        """End the ranks."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="league-ranks-")
        store = Path(self._folder.name) / "store"
        path = [str(each) for each in (Path.cwd(), self.path) if each is not None]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        for rank in range(self.world_size):
            command = [sys.executable, "-m", "benchmarks.league.worker", str(rank), str(self.world_size)]
            with open(os.devnull, "w") as nothing:
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(store)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=nothing,
                        text=True,
                        env=environment,
                    )
                )

    def _answers(self, timeout_s: float) -> list[str]:
        """Wait for a line of each rank; fewer if they end or take too long."""
        found: list[str] = []
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.stdout, selectors.EVENT_READ)
            while len(found) < self.world_size and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    line = key.fileobj.readline()
                    if not line:
                        return found
                    selector.unregister(key.fileobj)
                    found.append(line)
                    if json.loads(line)[0] in _ENDING:
                        end = min(end, time.monotonic() + _GRACE_S)
        return found
