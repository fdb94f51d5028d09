"""Which rank skipped a collective, from the snapshots of all ranks, and what is said of a failure. Pure functions.

A failure is one line that names the rank, the event and the operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from booster.errors import ConfigurationError
from booster.failure.operation_log import GroupRecord

Answer = TypeVar("Answer", bound=Hashable)


@dataclass
class RankSnapshot:
    """State of a rank."""

    rank: int
    # operation, call: innermost operation of the library and its call number; ("", 0) outside of any operation
    operation: str = ""
    call: int = 0
    phrase: str = ""
    wait: str = ""  # description of where the rank waits for others; empty if it does not wait
    blocked_s: float = 0.0  # seconds for which nothing has gone on in this wait
    # operation -> number of calls that completed without an error
    completed: dict[str, int] = field(default_factory=dict)
    # collectives that the rank has issued on its process groups
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    ended: bool = False
    # number of leading collectives of the previous step that the rank has skipped in this one (such as the checks of
    # the first batches); None if the steps differ in another way
    left_out: int | None = None
    on_device: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; the inverse of `of_json`."""
        return asdict(self)

    @staticmethod
    def of_json(values: dict[str, Any]) -> RankSnapshot:
        """Restore a snapshot from the values that `to_json` returned."""
        groups = {key: GroupRecord(**record) for key, record in values.pop("groups").items()}
        return RankSnapshot(**values, groups=groups)

    @property
    def where(self) -> str:
        """Description of the rank's position, for messages."""
        if self.ended:
            return "has ended"
        return f"is {self.phrase}, {self.wait}" if self.wait else f"is {self.phrase}"


def diagnose_standstill(snapshots: list[RankSnapshot]) -> Failure:
    """Return the failure for a standstill: every rank waits for others or has ended."""
    difference = _first_difference(snapshots)
    culprits = _straying(snapshots) or (difference.odd if difference is not None else [])
    culprits = culprits or _ended(snapshots) or _further_on(snapshots)
    if not culprits and any(one.on_device for one in snapshots):
        culprits = _missing(snapshots)
    culprits = culprits or _minority(snapshots)
    culprit = next((one for one in snapshots if one.rank in culprits), snapshots[0])
    others = [one for one in snapshots if one.rank not in culprits]
    message = f"skipped a collective: it {culprit.where}, while {places(others)}"
    if len(culprits) > 1:
        message = f"or {ranks_text(set(culprits) - {culprit.rank})} {message}"
    return Failure.found(culprit.rank, message, others[0].operation if others else culprit.operation)


def diagnose_mismatch(snapshots: list[RankSnapshot]) -> Failure | None:
    """Return the failure if a collective failed because members of its group called different ones, else None."""
    difference = _first_difference(snapshots)
    if difference is None:
        return None
    culprit = next(one for one in snapshots if one.rank in difference.odd)
    group = next(record for record in culprit.groups.values() if record.role == difference.role)
    message = (
        f"skipped or added a collective: {culprit.phrase} it called {difference.called[culprit.rank]} on "
        f"{group.text()} where others called {difference.usual}"
    )
    return Failure.found(culprit.rank, message, culprit.operation)


def diagnose_batches(batches: Mapping[int, str]) -> str:
    """Describe two ranks of a replica in passes of other shapes, or ""; `batches`: of `begin_batch`."""
    first: dict[tuple[int, int], tuple[int, dict[str, list[int]]]] = {}
    for rank, text in sorted(batches.items()):
        with contextlib.suppress(ValueError):  # before the first pass, or longer than the page
            number, replica, shapes = json.loads(text)
            other, expected = first.setdefault((number, replica), (rank, shapes))
            for name in [*expected, *shapes]:
                if expected.get(name) != shapes.get(name):
                    one, two = (each.get(name, "missing") for each in (expected, shapes))
                    return (
                        f"'{name}' of the batch is {one} on rank {other} and {two} on rank {rank}; all ranks of a "
                        "replica need the same batch: boost() the dataloader, or give it one seed on all of them"
                    )
    return ""


def compare_counts(counts: Mapping[int, Mapping[str, int]], ignored: Iterable[str] = ()) -> dict[str, dict[int, int]]:
    """Return group -> rank -> number of operations at the end of a step, of groups that differ."""
    by_group: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, numbers in counts.items():
        for key, number in numbers.items():
            by_group[key][rank] = number
    skipped = set(ignored)
    return {key: found for key, found in by_group.items() if key not in skipped and len(set(found.values())) > 1}


def diagnose_counts(
    call: int, differing: Mapping[str, Mapping[int, int]], snapshots: list[RankSnapshot], counts: Mapping[int, Mapping]
) -> Failure | None:
    """Return the failure for group members that disagree on their number of collectives; None if it is no failure."""
    for key, numbers in differing.items():
        records = [one.groups[key] for one in snapshots if key in one.groups]
        if not records or not all(each.only_collectives and each.is_comparable for each in records):
            continue
        group = records[0]
        # Groups of the same role do the same work on other ranks: they show which of two members is right.
        alike = {
            rank: counts[rank][other]
            for one in snapshots
            for other, record in one.groups.items()
            for rank in (one.rank,)
            if record.role == group.role and other in counts.get(rank, {})
        }
        usual = _most(alike or numbers) or _most(numbers)
        odd = [rank for rank, number in numbers.items() if number != usual] if usual is not None else list(numbers)
        rank = min(odd)
        rest = [number for other, number in numbers.items() if other != rank]
        verb = "skipped a collective" if numbers[rank] < max(rest) else "added a collective"
        who = f"or {ranks_text(set(odd) - {rank})} " if len(odd) > 1 else ""
        message = (
            f"{who}{verb}: at the end of optimizer.step (call {call}) it had issued {numbers[rank]} on {group.text()} "
            f"where the others had issued {max(rest) if usual is None else usual}; what they exchanged since does not "
            "belong together"
        )
        return Failure.found(rank, message, "optimizer.step")
    return None


def _straying(snapshots: list[RankSnapshot]) -> list[int]:
    """Return ranks that repeat the previous step differently than most; a changed batch length affects all ranks."""
    left_out = {one.rank: one.left_out for one in snapshots}
    usual = _most(left_out)
    return [] if usual is None else [rank for rank, count in left_out.items() if count != usual]


def _ended(snapshots: list[RankSnapshot]) -> list[int]:
    """Return the ranks whose script has ended, if there are any and not all have ended."""
    ended = [one.rank for one in snapshots if one.ended]
    return ended if 0 < len(ended) < len(snapshots) else []


def _further_on(snapshots: list[RankSnapshot]) -> list[int]:
    """Return ranks that have completed the call in which a member of their group waits for them."""
    found = set()
    for waiting in snapshots:
        if not waiting.operation:
            continue
        awaited = {rank for record in waiting.groups.values() if record.pending is not None for rank in record.ranks}
        found |= {
            other.rank
            for other in snapshots
            if other.rank in awaited and other.completed.get(waiting.operation, 0) >= waiting.call
        }
    return sorted(found) if len(found) < len(snapshots) else []


def missing_members(waiting: RankSnapshot, snapshots: list[RankSnapshot]) -> set[int]:
    """Return the group members that have not issued the collective that a rank waits in, or another one there."""
    found = set()
    for key, record in waiting.groups.items():
        number = record.pending
        if number is None:
            continue
        called = dict(record.operations).get(number, "")
        for one in snapshots:
            other = one.groups.get(key)
            if one.rank not in record.ranks or other is None:
                continue
            if not (other.only_collectives or (one.ended and record.only_collectives)):
                continue  # its number counts messages, too
            theirs = dict(other.operations).get(number, called)
            # Shapes may differ, as in all_to_all; the operation may not.
            if other.issued < number or theirs.partition(" of ")[0] != called.partition(" of ")[0]:
                found.add(one.rank)
    return found


def _missing(snapshots: list[RankSnapshot]) -> list[int]:
    """Return the missing members of the groups of others that are not themselves waiting for a missing member."""
    missing = {one.rank: missing_members(one, snapshots) for one in snapshots}
    return sorted({rank for ranks in missing.values() for rank in ranks if not missing[rank]})


def _minority(snapshots: list[RankSnapshot]) -> list[int]:
    """Return the smallest class of ranks that are in the same position."""
    for place in (lambda one: (one.operation, one.call), lambda one: one.wait):
        classes: dict[Hashable, list[int]] = defaultdict(list)
        for one in snapshots:
            classes[place(one)].append(one.rank)
        if len(classes) > 1:
            return min(classes.values(), key=len)
    return [one.rank for one in snapshots]


@dataclass(frozen=True)
class _Difference:
    """A collective that some ranks called where others called a different one."""

    # role, number: role of the groups, and sequence number of the collective
    role: str
    number: int
    called: Mapping[int, str]  # rank -> collective
    usual: str  # the majority's collective, among ranks with the same history of collectives
    odd: list[int]  # ranks with this history that called another collective
    within_group: bool  # whether members of one group differ


def _first_difference(snapshots: list[RankSnapshot]) -> _Difference | None:
    """Return the first collective that a minority called differently, on groups of the same role.

    Differences between members of one group come first, then differences between groups. Pipeline stages may differ
    legitimately: only ranks with the same history of collectives are compared.
    """
    found = [difference for role in _roles(snapshots) for difference in role.differences()]
    return min(found, key=lambda one: (not one.within_group, one.number), default=None)


class _Role:
    """Collectives that ranks called on the groups of one role.

    Attributes:
        group: rank -> its group.
        called: sequence number -> rank -> collective.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.group: dict[int, str] = {}
        self.called: dict[int, dict[int, str]] = defaultdict(dict)

    def differences(self) -> Iterator[_Difference]:
        begin = max(min(number for number, called in self.called.items() if rank in called) for rank in self.group)
        so_far: dict[int, Hashable] = dict(
            self.group
        )  # hash of a rank's history of collectives; initially only its group
        for number in sorted(number for number in self.called if number >= begin):
            called = self.called[number]
            alike: dict[Hashable, dict[int, str]] = defaultdict(dict)
            for rank, name in called.items():
                alike[so_far[rank]][rank] = name
            for those in alike.values():
                usual = _most(those)
                odd = [rank for rank, name in those.items() if name != usual]
                if usual is not None and odd:
                    yield _Difference(self.name, number, called, usual, odd, self._is_within_group(called))
            for rank, name in called.items():
                so_far[rank] = hash((name if number == begin else so_far[rank], name))

    def _is_within_group(self, called: Mapping[int, str]) -> bool:
        return len({(self.group[rank], name) for rank, name in called.items()}) > len(
            {self.group[rank] for rank in called}
        )


def _roles(snapshots: list[RankSnapshot]) -> list[_Role]:
    roles: dict[str, _Role] = {}
    for one in snapshots:
        for key, record in one.groups.items():
            if not record.is_comparable:
                continue
            role = roles.setdefault(record.role, _Role(record.role))
            if record.operations:
                role.group[one.rank] = key
            for number, name in record.operations:
                role.called[number][one.rank] = name
    return [role for role in roles.values() if role.called]


def _most(values: Mapping[int, Answer]) -> Answer | None:
    """Return the value that more than half of the keys have; None if there is none."""
    value, count = Counter(values.values()).most_common(1)[0]
    return value if count * 2 > len(values) else None


def places(snapshots: list[RankSnapshot]) -> str:
    """Describe where ranks are, as in `ranks 0 and 2 are in …`; ranks in the same position are grouped."""
    together: dict[str, list[int]] = defaultdict(list)
    for one in snapshots:
        together[one.where.removeprefix("is ")].append(one.rank)
    parts = []
    for where, ranks in together.items():
        verb = "" if where == "has ended" else "is " if len(ranks) == 1 else "are "
        parts.append(f"{ranks_text(ranks)} {verb}{where}")
    return " and ".join(parts) or "nothing goes on"


INTERRUPTED = 130
# Exit code of ranks of an elastic job that leave together at a step boundary (EX_TEMPFAIL of sysexits.h).
LEFT = 75
# Environment variable: a file that receives the line too; it tells `booster run` that the failure was reported.
REPORT_VARIABLE = "BOOSTER_REPORT"
# Set in ranks whose layout is from the command line: what does not fit it is a mistake there.
LAYOUT_VARIABLE = "BOOSTER_TAKEN_OVER"
_MAX_MESSAGE = 600
# Error messages of gloo, NCCL and the store if another process did not do its part.
_COMMUNICATION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|timeout|gloo|nccl|socket|waited without an "
    r"answer|could not send|application timeout|store->get",
    re.IGNORECASE,
)
# What the kernel says of a connection whose other end has not answered for long.
_UNANSWERED = re.compile(r"connection timed out|no route to host|network is unreachable", re.IGNORECASE)
# A plugin in the words of a message, whose options the user of a command line gives otherwise.
_PLUGIN = re.compile(r"(plugin=)?HybridParallelPlugin\(([^()]*)\)")
_ROOT = Path(__file__).resolve().parents[2]
# Folders of code that is not the user's: of Python and what it has installed, and of this library.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    *(f"{_ROOT / name}{os.sep}" for name in ("booster", "plugins", "shardformer", "hybrid_booster")),
)
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """First failure of a job, as exchanged between ranks."""

    rank: int  # rank that failed
    operation: str  # operation that this rank was in
    kind: str  # class name of the exception; empty if other ranks detected the failure
    message: str  # message in one line
    is_users: bool  # whether it is a mistake in the user's script, or Ctrl-C, where a traceback would not help
    exit_code: int  # exit code of the ranks that end because of it

    @classmethod
    def of(cls, error: BaseException, operation: str, rank: int) -> Failure:
        """Create a failure from an exception, with its message in one line."""
        message = " ".join(str(error).split())
        interrupted = isinstance(error, KeyboardInterrupt)
        is_of_command_line = isinstance(error, ConfigurationError) and os.environ.get(LAYOUT_VARIABLE)
        if is_of_command_line:
            message = _PLUGIN.sub(_as_layout, message)
        message = "interrupted" if interrupted else message[:_MAX_MESSAGE]
        if isinstance(error, ConfigurationError) and not is_of_command_line:
            message += _line_of_script(error)
        return cls(
            rank=rank,
            operation=operation,
            kind=type(error).__name__,
            message=message,
            is_users=interrupted or isinstance(error, ConfigurationError),
            exit_code=INTERRUPTED if interrupted else 2 if is_of_command_line else 1,
        )

    @classmethod
    def found(cls, rank: int, message: str, operation: str = "") -> Failure:
        """Create a failure that other ranks detected, of a rank that cannot report it itself."""
        return cls(rank, operation, "", message, False, 1)

    def line(self) -> str:
        """Return the line to print: for a user's mistake only the message, else also where it happened."""
        if self.exit_code == INTERRUPTED:
            return self.message
        if self.is_users:
            return f"error: {self.message}"
        if not self.kind:
            return f"error: rank {self.rank} {self.message}"
        place = f" in {self.operation}" if self.operation else ""
        return f"error on rank {self.rank}{place}: {self.kind}: {self.message}"


def _line_of_script(error: BaseException) -> str:
    """Return the user's line that raised `error`, or called what did, as ` (train.py, line 12)`; empty if none did."""
    inner = reversed(list(traceback.walk_tb(error.__traceback__)))
    around = traceback.walk_stack(sys._getframe())
    for frame, line in chain(inner, around):
        path = frame.f_code.co_filename
        if Path(path).is_file() and not path.startswith(_LIBRARIES):
            return f" ({path.removeprefix(os.getcwd() + os.sep)}, line {line})"
    return ""


def _as_layout(plugin: re.Match[str]) -> str:
    return " ".join(["--layout", re.sub("[ '\"]", "", plugin[2])]).rstrip()


def is_about_communication(error: BaseException) -> bool:
    """Return whether the error may be a consequence of another rank's failure."""
    return isinstance(error, RuntimeError | OSError) and _COMMUNICATION.search(str(error)) is not None


def is_unanswered(error: BaseException) -> bool:
    """Return whether the error is of a connection to a machine that does not answer."""
    return isinstance(error, RuntimeError | OSError) and _UNANSWERED.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return whether the error is a timeout."""
    return isinstance(error, RuntimeError | OSError) and _TIMED_OUT.search(str(error)) is not None


def ending(status: int | None) -> str:
    """Describe how a process ended; `status`: wait status of the process; None if it is unknown."""
    if status is None:
        return "died"
    number = status & 0x7F
    if not number:
        return f"ended with exit code {status >> 8}"
    return f"was ended by {signal_name(number)}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Format a list of ranks: `rank 3`, `ranks 0, 2 and 3`, `ranks 0 to 15`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
