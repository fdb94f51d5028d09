"""The step boundary at which all ranks leave together, so that others can join in the next round."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch.distributed as dist

from booster.elastic.place import ElasticPlace
from booster.failure.failure_report import LEFT

_KEY = "elastic/leave_at"


class StepBoundary:
    """Agreement on the snapshot after which all ranks leave.

    Rank 0 says in one snapshot that the next is the last. No rank can pass the step between the two without rank 0, so
    all of them know when they get there.

    Args:
        place: place of this rank in its elastic job.
        store: store of all ranks of this round.
        rank: this rank.
    """

    def __init__(self, place: ElasticPlace, store: dist.Store, rank: int) -> None:
        self._place, self._store, self._rank = place, store, rank
        self._is_said = False

    def pass_or_leave(self, number: int) -> None:
        """End this process if all ranks leave after the snapshot `number`."""
        if self._store.check([_KEY]) and int(self._store.get(_KEY)) <= number:
            leave(self._place)
        if self._rank == 0 and not self._is_said and self._place.is_asked_to_leave():
            self._is_said = True
            self._store.set(_KEY, str(number + 1))


def leave(place: ElasticPlace) -> NoReturn:
    """End this process in a way that its agent takes for no failure; all ranks call this together."""
    place.note("left")
    sys.exit(LEFT)
