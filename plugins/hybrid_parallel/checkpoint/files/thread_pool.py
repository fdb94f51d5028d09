"""Parallel reads by a thread pool.

A single thread does not saturate memory bandwidth, so a rank with several cores uses several threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

_MOST = 8
Item = TypeVar("Item")


def for_each(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call `work` for each item in a thread pool, and raise the first error; `work` should mostly release the GIL."""
    threads = _cores_of_a_rank()
    if threads == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="booster-read") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _cores_of_a_rank() -> int:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // ranks_here, 1), _MOST)
