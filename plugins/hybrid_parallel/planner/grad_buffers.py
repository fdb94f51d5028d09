"""Whole gradients that are in memory before their reduction, where ranks keep shards of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plugins.hybrid_parallel.planner.planned_buckets import PlannedBucket, RankParameters
from plugins.hybrid_parallel.zero.reducer import IN_FLIGHT, KEPT_BUFFERS


@dataclass
class _Pool:
    """Bytes of the buffers of a `GradBufferPool`, of which the pages that were never written are not in memory.

    Attributes:
        unit: minimum size of a buffer in bytes; 0 where buffers go back to torch's cache, as on a GPU.
        free: [size, written bytes] of each free buffer.
        taken: bucket -> the same of its buffer.
        peak: the most bytes at once.
    """

    unit: int
    free: list[list[int]] = field(default_factory=list)
    taken: dict[int, list[int]] = field(default_factory=dict)
    peak: int = 0

    def take(self, number: int, size: int) -> None:
        """Take the smallest buffer that is large enough, or a new one."""
        fits = [each for each in self.free if each[0] >= size]
        buffer = min(fits) if fits else [max(size, self.unit), 0]
        if fits:
            self.free.remove(buffer)
        buffer[1] = max(buffer[1], size)
        self.taken[number] = buffer
        self.peak = max(self.peak, sum(each[1] for each in (*self.free, *self.taken.values())))

    def give(self, number: int) -> None:
        """Give the buffer of a bucket back."""
        self.free.append(self.taken.pop(number))


def grad_buffer_bytes(
    held: RankParameters, zero_stage: int, num_passes: int, has_one_stage: bool, bucket_bytes: int, device_type: str
) -> int:
    """Return the bytes beyond the rank's shard of gradients that a step needs for gradients.

    On a CPU a rank reduces buckets while the backward pass computes the next ones, and reuses their memory, unless it
    must not wait for other ranks there. On a GPU all gradients of a pass stay until it ends.

    Args:
        held: the rank's parameters.
        zero_stage: 0 to 3.
        num_passes: backward passes of a step.
        has_one_stage: whether replicas of one stage are alone, so that ranks may wait for each other in a pass.
        bucket_bytes: the limit of a bucket.
        device_type: "cpu" or "cuda".
    """
    if held.num_shards == 1:
        return 0
    whole = sum(bucket.grad_bytes for bucket in held.buckets)
    reduces_early = zero_stage >= 2 or num_passes == 1
    in_flight = whole
    if reduces_early and has_one_stage and device_type == "cpu":
        in_flight = _in_flight(held.buckets, bucket_bytes)
    # From the second pass on, its reduced shards are there in addition to the sum of those before.
    return in_flight + (whole // held.num_shards if zero_stage >= 2 and num_passes > 1 else 0)


def _in_flight(buckets: Sequence[PlannedBucket], unit: int) -> int:
    """Run the reducer's order of launches and releases over two passes; see `GradientReducer._launch_next`."""
    pool = _Pool(unit)
    for _ in range(2):
        missing = [len(bucket.members) for bucket in buckets]
        launched = 0
        for number, is_last in _arrivals(buckets):
            if number not in pool.taken:
                pool.take(number, buckets[number].grad_bytes)
            missing[number] -= is_last
            while launched < len(buckets) and missing[launched] == 0:
                launched = _launch(pool, launched)
        while launched < len(buckets):
            if launched not in pool.taken:  # no gradient has reached it
                pool.take(launched, buckets[launched].grad_bytes)
            launched = _launch(pool, launched)
        for number in sorted(pool.taken):
            pool.give(number)
        pool.free = sorted(pool.free, reverse=True)[:KEPT_BUFFERS]
    return pool.peak


def _launch(pool: _Pool, number: int) -> int:
    earlier = number - IN_FLIGHT
    if earlier > 0 and earlier - 1 in pool.taken:
        pool.give(earlier - 1)
    return number + 1


def _arrivals(buckets: Sequence[PlannedBucket]) -> Iterator[tuple[int, bool]]:
    """Yield (bucket, whether it is the parameter's last) of each gradient; the last parameters come first.

    A parameter that several modules hold has its first gradient at once, from the head, and its last at its own place.
    """
    places = [(held.place, number) for number, bucket in enumerate(buckets) for held in bucket.members]
    for number, bucket in enumerate(buckets):
        if any(held.is_repeated for held in bucket.members):
            yield number, False
    for _, number in sorted(places, reverse=True):
        yield number, True
