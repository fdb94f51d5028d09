"""Collectives that look before they run: torch's own ProcessGroupWrapper, with ranks as the user counts them.

In a group that is made under `checked_collectives`, operation, shape and dtype of every collective are compared over
its ranks first. Point-to-point messages are not: those of pipelines say their shapes themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

from booster.errors import SynchronyError

_MISMATCH = "Detected mismatch between collectives"
_RANK = re.compile(r"Rank (\d+) is running collective")
_CALL = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=(?P<shape>\[[^\]]*\]), TensorDtypes=(?P<dtype>\w+))?"
)


@contextmanager
def checked_collectives(enabled: bool) -> Iterator[None]:
    """Make groups that compare their collectives, where `enabled`."""
    before = dist.get_debug_level()
    if enabled:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


@contextmanager
def naming_ranks() -> Iterator[None]:
    """Around work with collectives: a mismatch is told by the ranks of the job, where torch counts within the group.

    Raises:
        SynchronyError: ranks of a group called different collectives, on all of its ranks alike.
    """
    try:
        yield
    except RuntimeError as error:
        if _MISMATCH not in str(error):
            raise
        raise SynchronyError(_in_words(str(error), _ranks_of(error.__traceback__))) from error


def _in_words(message: str, ranks: list[int]) -> str:
    """A rank reads another's call as if it had as many dims as its own, and may not make sense of it."""
    involved = [ranks[int(number)] for number in _RANK.findall(message)]
    calls = {
        ranks[int(call["rank"])]: f"{call['operation']} of {call['dtype'] or ''} {call['shape'] or 'nothing'}"
        for call in _CALL.finditer(message)
    }
    said = [f"rank {rank} calls {calls.get(rank, 'something else, see its message')}" for rank in sorted(involved)]
    return f"ranks {ranks} are out of step: {', '.join(said)}"


def _ranks_of(traceback: TracebackType | None) -> list[int]:
    """Global ranks of the group that the failing call was made in: the innermost argument of the name `group`."""
    group = None
    while traceback is not None:
        found = traceback.tb_frame.f_locals.get("group")
        group = found if isinstance(found, dist.ProcessGroup) else group
        traceback = traceback.tb_next
    return dist.get_process_group_ranks(group or dist.group.WORLD)
