"""Ranks that judge one class after the other; new ones take over after a crash, a hang, or an error on one of them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from benchmarks.league.outcome import CRASHED, HUNG, REFUSED, WRONG, Outcome

_START_S = 900.0
_GRACE_S = 4.0  # for the others, once a rank has failed: a launcher would end them
_ENDING = (REFUSED, CRASHED)


@dataclass(frozen=True)
class Rank:
    """One end of the line to a rank.

    Attributes:
        pid: its process; None until it has said so.
        line: tasks are sent on it.
        answers: what is read from it.
    """

    pid: int | None
    line: socket.socket
    answers: IO[str]


class Ranks:
    """Processes for systems that share an environment.

    One process imports the environment and is forked for each set of ranks, so that a set starts in a second.

    Args:
        path: folder that comes first on the path of imports: the environment of the systems; None for the present one.
        timeout_s: after which ranks that do not answer have hung.
        imports: modules that are imported before ranks are forked, where they can be.
    """

    def __init__(self, path: Path | None, timeout_s: float, imports: tuple[str, ...] = ()) -> None:
        self.path, self.timeout_s, self.imports = path, timeout_s, imports
        self._ranks: list[Rank] = []
        self._host: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="league-ranks-")
        self._stores = 0

    def judge(self, system: str, family: str, name: str, tp_size: int, pp_size: int) -> Outcome:
        """Judge a class on all ranks; the worst of their outcomes counts.

        What is wrong, crashed or hung after another class, or hung once, is judged again on ranks that have just
        started: it may be the fault of what ran before, or of a machine that does something else, too.
        """
        if len(self._ranks) != tp_size * pp_size:
            self.stop()
        is_fresh = not self._ranks
        found = self._judge_once(system, family, name, tp_size, pp_size)
        if found.kind == HUNG or (found.kind in (WRONG, CRASHED) and not is_fresh and "fault" not in system):
            self.stop()
            found = self._judge_once(system, family, name, tp_size, pp_size)
        return found

    def _judge_once(self, system: str, family: str, name: str, tp_size: int, pp_size: int) -> Outcome:
        if not self._ranks:
            self._start(tp_size * pp_size)
        task = json.dumps([system, family, name, tp_size, pp_size]) + "\n"
        try:
            for rank in self._ranks:
                rank.line.sendall(task.encode())
        except (BrokenPipeError, ConnectionResetError):
            self.stop()
            return Outcome(CRASHED, "a rank ended")
        answers, has_ended = self._answers(self.timeout_s)
        found = [Outcome(*each) for each in answers]
        failed = [each for each in found if each.kind in _ENDING]
        if len(found) < len(self._ranks):
            self.stop()  # the others wait for it
            if failed:
                return failed[0]
            ended = Outcome(CRASHED, "a rank ended")
            return ended if has_ended else Outcome(HUNG, f"no answer in {self.timeout_s:.0f} s")
        if len({each.kind for each in found}) > 1 or found[0].kind == CRASHED:
            self.stop()  # collectives of one rank may be left over
        return next((each for each in found if each.kind != found[0].kind and each.kind != "exact"), found[0])

    def stop(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            if rank.pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)
            rank.answers.close()
            rank.line.close()
        self._ranks = []

    def close(self) -> None:
        """End the ranks and the process that they were forked from."""
        self.stop()
        if self._host is not None:
            self._host.kill()
            self._host.wait()
            self._control.close()
        self._folder.cleanup()

    def _start(self, count: int) -> None:
        """Fork ranks, and wait until all are ready.

        Raises:
            RuntimeError: they are not in time, or one ended.
        """
        if self._host is None:
            self._start_host()
        self._stores += 1
        store = Path(self._folder.name) / f"store-{self._stores}"
        pairs = [socket.socketpair() for _ in range(count)]
        socket.send_fds(self._control, [f"{store}\n".encode()], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        self._ranks = [Rank(None, ours, ours.makefile("r")) for ours, _ in pairs]
        pids, _ = self._answers(_START_S)
        if len(pids) < count:
            self._host.kill()
            raise RuntimeError("the ranks do not start")
        self._ranks = [replace(rank, pid=pid) for (pid,), rank in zip(pids, self._ranks, strict=True)]

    def _start_host(self) -> None:
        path = [str(each) for each in (Path.cwd(), self.path) if each is not None]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        self._control, theirs = socket.socketpair()
        self._host = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.league.worker", *self.imports],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()

    def _answers(self, timeout_s: float) -> tuple[list[list], bool]:
        """Wait for a line of each rank, and return those of some ranks alone if one ends or takes too long.

        Returns:
            The lines, in the order of ranks, and whether a rank has ended.
        """
        found: dict[int, list] = {}
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self._ranks):
                selector.register(rank.line, selectors.EVENT_READ, (index, rank))
            while len(found) < len(self._ranks) and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    index, rank = key.data
                    line = _line_of(rank.answers)
                    if not line:
                        return [found[index] for index in sorted(found)], True
                    selector.unregister(key.fileobj)
                    found[index] = json.loads(line)
                    if found[index][0] in _ENDING:
                        end = min(end, time.monotonic() + _GRACE_S)
        return [found[index] for index in sorted(found)], False


def _line_of(line: IO[str]) -> str:
    try:
        return line.readline()
    except ConnectionResetError:
        return ""
