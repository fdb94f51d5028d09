"""Agreement between ranks: an error of one is raised on all, and collectives may be compared before they run.

They are compared by torch's own ProcessGroupWrapper, in a group that is created under `checked_collectives`: operation,
shape and dtype, with global ranks in its errors. Point-to-point messages are not compared: pipelines send the shapes of
their messages.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from booster.errors import ConfigurationError, SynchronyError
from booster.logging import get_logger
from shardformer.distributed.process_groups import all_gather_json
from shardformer.lazy.weight_files import WeightFileError

_logger = get_logger(__name__)


def raise_on_all_ranks(work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Do file work on this rank; if it fails on any rank of the group, raise on all of them.

    Errors of every kind are shared: after an error that was not, the other ranks would wait for this one.
    """
    result, problem, cause = None, None, None
    try:
        result = work()
    except Exception as error:
        problem, cause = _sentence(error), error
    problems = [found for found in all_gather_json(problem, group) if found is not None]
    if problems:
        raise ConfigurationError(problems[0]) from cause
    return result


def _sentence(error: Exception) -> str:
    if isinstance(error, ConfigurationError | WeightFileError):
        return str(error)
    if not isinstance(error, OSError | ValueError | KeyError | MemoryError):
        # A mistake of this library, not of the user.
        _logger.error("%s on rank %d", type(error).__name__, dist.get_rank(), exc_info=error)
    said = f"{type(error).__name__} on rank {dist.get_rank()}: {error}"
    if isinstance(error, KeyError) and error.__traceback__ is not None:  # the key alone does not say what lacks it
        *_, last = traceback.extract_tb(error.__traceback__)
        said += f" is not there ({Path(last.filename).name}, line {last.lineno})"
    return said


_MISMATCH = "Detected mismatch between collectives"
_RANK = re.compile(r"Rank (\d+) is running collective")
_CALL = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=(?P<shape>\[[^\]]*\]), TensorDtypes=(?P<dtype>\w+))?"
)


@contextmanager
def checked_collectives(enabled: bool) -> Iterator[None]:
    """Create groups that compare their collectives, if `enabled`."""
    before = dist.get_debug_level()
    if enabled:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


@contextmanager
def naming_ranks() -> Iterator[None]:
    """Report mismatched collectives in this context by their global ranks; torch counts ranks within the group.

    Raises:
        SynchronyError: if ranks of a group called different collectives; raised on all of its ranks.
    """
    try:
        yield
    except RuntimeError as error:
        if _MISMATCH not in str(error):
            raise
        raise SynchronyError(_in_words(str(error), _ranks_of(error.__traceback__))) from error


def _in_words(message: str, ranks: list[int]) -> str:
    """Describe a mismatch; a rank parses another's call with its own number of dims, and may fail to do so."""
    involved = [ranks[int(number)] for number in _RANK.findall(message)]
    calls = {
        ranks[int(call["rank"])]: f"{call['operation']} of {call['dtype'] or ''} {call['shape'] or 'nothing'}"
        for call in _CALL.finditer(message)
    }
    said = [f"rank {rank} calls {calls.get(rank, 'something else, see its message')}" for rank in sorted(involved)]
    return f"ranks {ranks} are out of step: {', '.join(said)}"


def _ranks_of(traceback: TracebackType | None) -> list[int]:
    """Return the global ranks of the group of the failing call: the innermost local variable named `group`."""
    group = None
    while traceback is not None:
        found = traceback.tb_frame.f_locals.get("group")
        group = found if isinstance(found, dist.ProcessGroup) else group
        traceback = traceback.tb_next
    return dist.get_process_group_ranks(group or dist.group.WORLD)
