"""The rules of CUDA and NCCL that a CPU does not have, each switched by its name.

- `device_tensors`: a collective of a group of NCCL takes tensors of the device alone.
- `contiguous`: its tensors are contiguous.
- `dtypes`: they have a dtype that NCCL knows.
- `lazy_communicators`: without a bound device, a communicator is made by the first operation that needs it, and blocks
  the host until all of its members come: the whole group for collectives and batched operations, both ranks for a pair
  that sends or receives.
- `collective_order`: the operations of a communicator come in one order on all ranks, with the same number of elements
  and dtype.
- `p2p_order`: of two ranks that send and receive, both launch the transfers of a communicator in one order.
- `one_queue`: the operations of a communicator run one after the other, and a transfer ends when both sides have come.
- `module_loading`: the first launch of a kernel loads its code, which waits until the device has nothing left to do.
- `random_drains`: now and then any launch does (the allocator frees memory, a kernel is tuned).
- `poisoned_results`: what an operation writes holds NaN until its `wait`.
- `inputs_unchanged`: what it reads or writes is not touched until then.
- `late_copies`: a copy to pinned memory that does not block holds NaN until the host has waited for the device.
- `stream_order`: of two streams that use the same memory, one of them to write, an event makes the later one wait.
- `record_stream`: memory is not given out again while another stream may still use it, which the stream that it was
  allocated on does not come after, and for which nobody called `record_stream`.

Other rules hold always: kernels refuse tensors of several devices, and random numbers come from the device's own
generator. Not a rule, because no number of them is wrong: waits of the host, which `host_syncs` lists by source line
and `sync_budget` limits.

Where the simulation is stricter than a GPU: `wait` blocks the host, not only the stream, so that a host never runs
ahead of a transfer that it waits for, and meanwhile makes no communicator that another one needs. Memory that was freed
too early is refused at the next allocation of its stream, whatever its size.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zoo_tests.simcuda import runtime

ALL = (
    "device_tensors",
    "contiguous",
    "dtypes",
    "lazy_communicators",
    "collective_order",
    "p2p_order",
    "one_queue",
    "module_loading",
    "random_drains",
    "poisoned_results",
    "inputs_unchanged",
    "late_copies",
    "stream_order",
    "record_stream",
)
DRAINS = ("module_loading", "random_drains")
DEFAULT = frozenset(ALL) - frozenset(DRAINS)
_VARIABLE = "SIMCUDA_RULES"  # "all", or names with commas between them
_HANGS_AFTER_S = 30.0
_DRAIN_PROBABILITY = 0.05
_DTYPES = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@dataclass
class Settings:
    """What is checked now.

    Attributes:
        active: names of rules.
        hangs_after_s: seconds until a wait counts as endless.
        draws: decides which launches drain.
    """

    active: frozenset[str]
    hangs_after_s: float = _HANGS_AFTER_S
    draws: random.Random = field(default_factory=lambda: random.Random(0))


def _initial() -> frozenset[str]:
    chosen = os.environ.get(_VARIABLE)
    if chosen is None:
        return DEFAULT
    return _known(ALL if chosen == "all" else filter(None, chosen.split(",")))


def _known(names: Iterable[str]) -> frozenset[str]:
    unknown = set(names := frozenset(names)) - set(ALL)
    if unknown:
        raise ValueError(
            f"no rule of the simulated device is called {', '.join(sorted(unknown))}; use {', '.join(ALL)}"
        )
    return names


settings = Settings(_initial())


def is_on(name: str) -> bool:
    """Whether the rule is checked now."""
    return name in settings.active


@contextmanager
def only(*names: str, hangs_after_s: float = _HANGS_AFTER_S) -> Iterator[None]:
    """Check these rules and no others, on all ranks; as in a new process, no kernel is loaded, no communicator made."""
    global settings
    outer, settings = settings, Settings(_known(names), hangs_after_s)
    apply()
    try:
        yield
    finally:
        settings = outer
        apply()


@contextmanager
def also(*names: str, hangs_after_s: float = _HANGS_AFTER_S) -> Iterator[None]:
    """Check these rules next to those that are checked already."""
    with only(*(settings.active | _known(names)), hangs_after_s=hangs_after_s):
        yield


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave these rules out."""
    with only(*(settings.active - _known(names)), hangs_after_s=settings.hangs_after_s):
        yield


def apply() -> None:
    """Tell the library which rules of its own are on, and everybody that they changed."""
    every, first = is_on("random_drains"), is_on("module_loading")
    runtime.lib.simcuda_observe_kernels(2 if every else 1 if first else 0)
    runtime.lib.simcuda_delay_copies(is_on("late_copies"))
    runtime.lib.simcuda_check_streams(is_on("stream_order"), is_on("record_stream"))
    _loaded.clear()
    runtime.tell("rules", "changed")


_loaded: set[str] = set()


def why_it_drains(kernel: str) -> str | None:
    """Why the launch of a kernel waits for the device, if it does."""
    if is_on("module_loading") and kernel not in _loaded:
        _loaded.add(kernel)
        return f"the first launch of {kernel} loads its code"
    if is_on("random_drains") and settings.draws.random() < _DRAIN_PROBABILITY:
        return f"{kernel} waits for memory"
    return None


def check_tensors(operation: str, tensors: Iterable[Tensor]) -> None:
    """What NCCL asks of the tensors of an operation.

    Raises:
        RuntimeError: one of them is refused.
    """
    for tensor in tensors:
        what = f"{operation} of {tensor.dtype} {list(tensor.shape)} at {runtime.source_line()}"
        if is_on("device_tensors") and not tensor.is_cuda:
            raise RuntimeError(f"{what}: NCCL takes no tensor of the CPU")
        if is_on("contiguous") and not tensor.is_contiguous():
            raise RuntimeError(f"{what}: tensors must be contiguous, and this one has strides {tensor.stride()}")
        if is_on("dtypes") and tensor.dtype not in _DTYPES:
            raise RuntimeError(f"{what}: NCCL has no such dtype")


def refuse_races(kind: str, what: str) -> None:
    """Raise what the library has found of two streams, at the line that runs now.

    Raises:
        RuntimeError: always, for a race.
    """
    if kind == "race":
        raise RuntimeError(f"{what} (at {runtime.source_line()})")


# ----- waits of the host -----


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """List what the host waits for: "item at file.py:12"."""
    found: list[str] = []

    def listen(kind: str, what: str) -> None:
        if kind == "sync":
            found.append(f"{what} at {runtime.source_line()}")

    runtime.listeners.append(listen)
    try:
        yield found
    finally:
        runtime.listeners.remove(listen)


@contextmanager
def sync_budget(most: int) -> Iterator[None]:
    """Allow the host so many waits.

    Raises:
        RuntimeError: there were more; the message has the source line of each.
    """
    with host_syncs() as found:
        yield
    if len(found) > most:
        raise RuntimeError(f"the host waited {len(found)} times for the device, {most} allowed:\n" + "\n".join(found))
