"""Time profile of a tensor-parallel step: tp2, the Llama of `tensor_parallel`, rank 0, torch's profiler.

Results are shares of the step's wall time. An exposed collective is one that the host waits for, in its call, or in
the wait if it was started earlier. CPU only: a GPU's kernels run asynchronously to the host.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaForSequenceClassification

from benchmarks.harness import run_ranks, table
from benchmarks.tensor_parallel import config
from shardformer import ShardConfig, ShardFormer

COLLECTIVE = "collectives, exposed"
REST = "Python and dispatch"
KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    COLLECTIVE: (COLLECTIVE, "c10d::", "gloo:"),
    "copies": ("aten::copy_", "aten::clone", "aten::contiguous", "aten::cat", "aten::to", "aten::_to_copy"),
    "elementwise and reductions": ("aten::",),
}


def kind_of(event: str) -> str:
    """Return the kind that a profiler event belongs to."""
    return next((kind for kind, starts in KINDS.items() if event.startswith(starts)), REST)


class _Waited:
    """Handle of an asynchronous collective whose wait shows in the profile."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        with record_function(COLLECTIVE):
            self._work.wait()


@contextmanager
def marked_collectives(calls: list[str]) -> Iterator[None]:
    """Record all-reduces in the profile, and append their names to `calls`."""
    reduce = dist.all_reduce

    def marked(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        calls.append("all_reduce")
        with record_function(COLLECTIVE):
            work = reduce(*args, async_op=async_op, **kwargs)
        return None if work is None else _Waited(work)

    with mock.patch.object(dist, "all_reduce", marked):
        yield


def shares(length: int, repeats: int) -> tuple[dict[str, float], int]:
    """Return each kind's share of the wall time, and the number of all-reduces per step."""
    torch.manual_seed(0)
    model, _ = ShardFormer(ShardConfig()).optimize(LlamaForSequenceClassification(config()))
    ids, labels = torch.randint(1, 32000, (4, length)), torch.randint(0, 2, (4,))
    calls: list[str] = []

    def step() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        model.zero_grad()

    with marked_collectives(calls):
        step()
        calls.clear()
        found = _profiled(step, repeats)
    return found, len(calls) // repeats


def report(quick: bool) -> str:
    lengths, repeats = ((128,), 1) if quick else ((256, 1024), 3)
    found = {length: run_ranks(shares, 2, length, repeats) for length in lengths}
    rows = [[kind, *(f"{found[length][0][kind] * 100:.1f} %" for length in lengths)] for kind in (*KINDS, REST)]
    counts = ", ".join(f"{found[length][1]} at N_CTX {length}" for length in lengths)
    return table(
        "Where each millisecond of a tp2 step goes (Llama of 4 layers, forward and backward)",
        ["kind", *(f"N_CTX {length}" for length in lengths)],
        rows,
        f"All-reduces per step: {counts}; two per layer in the forward and two in the backward pass. CPU only.",
    )


def _profiled(step: Callable[[], None], repeats: int) -> dict[str, float]:
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        wall = time.perf_counter() - start
    seconds: Counter[str] = Counter()
    for event in profiler.key_averages():
        # The work of gloo's threads is counted as the time that the host waits for it.
        if not event.key.startswith("gloo:"):
            seconds[kind_of(event.key)] += event.self_cpu_time_total * 1e-6
    seconds[REST] = wall - sum(value for kind, value in seconds.items() if kind != REST)
    return {kind: seconds[kind] / wall for kind in (*KINDS, REST)}
