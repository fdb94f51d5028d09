"""Count the micro-batches whose activations each pipeline rank holds at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind


@cache
def peak_activations(style: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[set[tuple[int, ...]]]:
    """Return, for each rank, the peak numbers of live activations of its chunks.

    Each element is a set of tuples; none of them is exceeded by another one in every position. A tuple has the number
    of micro-batches of each chunk that wait for their backward pass, and then the number of those of which a split
    backward pass has left the weight gradients.
    """
    schedule = SCHEDULES[style] if num_ranks > 1 else SCHEDULES["1f1b"]
    # More micro-batches only repeat the steady state, except for GPipe, which keeps the activations of all of them.
    few = num_microbatches if style == "gpipe" else min(num_microbatches, 3 * num_ranks)
    found = []
    for rank in range(num_ranks):
        own = schedule.stages_of(rank, num_ranks, num_chunks)
        found.append(_largest(_alive(schedule.actions(rank, num_ranks, few, num_chunks), own)))
    return found


def _alive(actions: Sequence[Action], own: Sequence[int]) -> set[tuple[int, ...]]:
    counts, deferred, seen = dict.fromkeys(own, 0), dict.fromkeys(own, 0), set()
    for action in actions:
        if action.kind is Kind.FORWARD:
            counts[action.stage] += 1
        elif action.kind is Kind.BACKWARD_WEIGHT:
            deferred[action.stage] -= 1
        else:
            counts[action.stage] -= 1
            deferred[action.stage] += action.kind is Kind.BACKWARD_INPUT
        seen.add((*counts.values(), *deferred.values()))
    return seen


def _largest(found: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Keep the maximal tuples: those that no other tuple matches or exceeds in every position."""
    return {
        each
        for each in found
        if not any(other != each and all(a >= b for a, b in zip(other, each, strict=True)) for other in found)
    }
