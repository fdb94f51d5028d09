"""Whole gradients that are in memory before their reduction, where ranks keep shards of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.planned_buckets import PlannedBucket, RankParameters
from plugins.hybrid_parallel.zero.reducer import IN_FLIGHT, KEPT_BUFFERS


@dataclass
class _Pool:
    """Bytes of the buffers of a `GradBufferPool`, whose pages are in memory once a bucket has written them.

    Any bucket may get any buffer that is large enough, so that sooner or later the largest of them has been in it.

    Attributes:
        sizes: bytes of the gradients of each bucket.
        unit: minimum bytes of a buffer.
        free: bytes of the free buffers.
        taken: bucket -> bytes of its buffer.
        peak: the most bytes in memory at once.
    """

    sizes: Sequence[int]
    unit: int
    free: list[int] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)
    peak: int = 0

    def take(self, number: int) -> None:
        """Take the smallest buffer that is large enough for a bucket, or a new one."""
        fits = [each for each in self.free if each >= self.sizes[number]]
        if fits:
            self.free.remove(min(fits))
        self.taken[number] = min(fits, default=max(self.sizes[number], self.unit))
        self.peak = max(self.peak, sum(map(self.written, (*self.free, *self.taken.values()))))

    def give(self, number: int) -> None:
        """Give the buffer of a bucket back."""
        self.free.append(self.taken.pop(number))

    def written(self, buffer: int) -> int:
        """Return the bytes of a buffer that are in memory."""
        return max((size for size in self.sizes if size <= buffer), default=0)


def grad_buffer_bytes(held: RankParameters, layout: Layout, device_type: str) -> int:
    """Return the bytes beyond the rank's shard of gradients that a step needs for gradients.

    On a CPU a rank reduces buckets while the backward pass computes the next ones, and reuses their memory, unless it
    must not wait for other ranks there. On a GPU all gradients of a pass stay until it ends.

    Args:
        held: the rank's parameters.
        layout: the layout.
        device_type: "cpu" or "cuda".
    """
    if held.num_shards == 1:
        return 0
    zero_stage, num_passes = layout.zero_stage, layout.num_microbatches
    whole = in_flight = sum(bucket.grad_bytes for bucket in held.buckets)
    if device_type == "cpu" and held.buckets:
        waits = layout.pp_size == layout.cp_size == 1
        pool = _Pool([bucket.grad_bytes for bucket in held.buckets], layout.config.zero.bucket_bytes(device_type))
        in_flight = _in_flight(held.buckets, pool, waits and (zero_stage >= 2 or num_passes == 1))
        # Ranks that do not own the copies of a parameter have a bucket of their own for them.
        in_flight += pool.written(pool.unit) if layout.tp_size > 1 else 0
    # From the second pass on, its reduced shards are there in addition to the sum of those before.
    return in_flight + (whole // held.num_shards if zero_stage >= 2 and num_passes > 1 else 0)


def _in_flight(buckets: Sequence[PlannedBucket], pool: _Pool, reduces_early: bool) -> int:
    """Run the reducer's order of launches and releases over two passes; see `GradientReducer._launch_next`."""
    for _ in range(2):
        missing = [len(bucket.members) for bucket in buckets]
        launched = 0
        for number, is_last in _arrivals(buckets):
            if number not in pool.taken:
                pool.take(number)
            missing[number] -= is_last
            while reduces_early and launched < len(buckets) and missing[launched] == 0:
                launched = _launch(pool, launched)
        while launched < len(buckets):
            if launched not in pool.taken:  # no gradient has reached it
                pool.take(launched)
            launched = _launch(pool, launched) if reduces_early else launched + 1
        for number in sorted(pool.taken):
            pool.give(number)
        pool.free = sorted(pool.free, reverse=True)[: KEPT_BUFFERS if reduces_early else None]
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
