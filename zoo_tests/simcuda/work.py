"""Operations of the simulated NCCL: what they do to tensors until their `wait`.

gloo works on copies, so that a result appears in its tensor at `wait` and not before, and what others do to the tensors
meanwhile is noticed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo_tests.simcuda import rules, runtime

_AS_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # what gloo has no type for
_SOON_S, _POLL_S = 0.5, 0.1


class Work(dist.Work):
    """One operation.

    Args:
        what: the operation and its tensors.
        phases: what it does on gloo, each when the one before it is done.
        results: (tensor of the device, its copy) that appear at `wait`.
        inputs: tensors of the device that are read.
        stream: the one of its communicator, which waits for the current one; `wait` makes the current one wait for it.
    """

    def __init__(
        self,
        what: str,
        phases: list[Callable[[], Any]],
        results: list[tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        stream: torch.Stream,
    ) -> None:
        super().__init__()
        self.what, self.line = what, runtime.source_line()
        self.phases, self._results = phases, results
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._held = (*inputs, *(tensor for tensor, _ in results))  # torch keeps their memory until `wait`
        stream.wait_stream(torch.cuda.current_stream())
        for number, tensor in enumerate(self._held):
            runtime.use_on(stream, tensor, number >= len(inputs), what)
        self._stream, self._end = stream, stream.record_event()
        if rules.is_on("poisoned_results"):
            _poison([tensor for tensor, _ in results], inputs)
        self._sums: list[tuple[Tensor, int]] = []
        if rules.is_on("inputs_unchanged"):
            touched = {id(tensor): tensor for tensor in (*inputs, *(tensor for tensor, _ in results))}
            self._sums = [(each, runtime.checksum(each)) for each in touched.values() if each.is_contiguous()]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation; its results are then in place.

        Raises:
            RuntimeError: it failed or did not end, or somebody touched its tensors.
        """
        limit = timeout.total_seconds() or rules.settings.hangs_after_s
        if not (self.done.wait(_SOON_S) or self._ends_within(limit - _SOON_S)):
            raise RuntimeError(
                f"rank {dist.get_rank()} waits in {runtime.source_line()} for {self.what} of {self.line}, which did "
                f"not end within {limit:g} s: on GPUs this hangs"
            )
        torch.cuda.current_stream().wait_event(self._end)
        self._finish()
        return True

    def _ends_within(self, limit_s: float) -> bool:
        """Wait as a host does for a GPU: the failure monitor reads the line at which it waits."""
        deadline = time.monotonic() + limit_s
        while not self.done.is_set() and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # in torch.cuda.synchronize()
        return self.done.is_set()

    def is_completed(self) -> bool:
        if self.done.is_set():
            self._end.query()
            self._finish()
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._results]

    def end(self, error: BaseException | None) -> None:
        """Mark the operation as done on the device."""
        self.error = error
        if error is None and not rules.is_on("poisoned_results"):
            self.deliver()
        self.done.set()

    def deliver(self) -> None:
        """Put the results in place."""
        self._sums = []
        for tensor, copy in self._results:
            _take_bytes(runtime.host(tensor), copy)
        self._results, self.phases = [], []

    def let_go(self) -> None:
        """Do what torch's watchdog does for an operation that nobody waits for: its memory lives until it has ended."""
        for tensor in self._held:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        self._held = ()

    def _finish(self) -> None:
        if self.error is not None:
            raise self.error
        sums, self._sums = self._sums, []
        for tensor, before in sums:
            if runtime.checksum(tensor) != before:
                raise RuntimeError(
                    f"a tensor of {self.what} of {self.line} was changed before its wait in {runtime.source_line()}"
                )
        self.deliver()
        self._held = ()


class Launch:
    """Operations that start together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self._started: list[Any] | None = None

    def start(self) -> None:
        """Start without a turn in the queue; nobody then waits for the other side of a transfer."""
        self._started = [work.phases[0]() for work in self.works]

    def run(self) -> None:
        error = None
        try:
            if self._started is not None:
                _wait_for(self._started)
            else:
                for phase in range(max(len(work.phases) for work in self.works)):
                    _wait_for([work.phases[phase]() for work in self.works if phase < len(work.phases)])
        except BaseException as caught:
            error = caught
        for work in self.works:
            work.end(error)


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def copy_of(tensor: Tensor) -> Tensor:
    """A CPU copy in a dtype that gloo has."""
    copy = runtime.host(tensor).clone(memory_format=torch.contiguous_format)
    return copy.view(torch.uint8) if copy.dtype in _AS_BYTES else copy


def _take_bytes(target: Tensor, copy: Tensor) -> None:
    if target.dtype == torch.bool:
        copy = copy != 0
    with torch.no_grad():
        (target.view(copy.dtype) if target.dtype != copy.dtype else target).copy_(copy)


def _poison(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Poison what is written, but for parts that are only read."""
    read = [tensor for tensor in inputs if all(tensor is not result for result in results)]
    kept = [runtime.host(tensor).clone() for tensor in read if tensor.is_cuda]
    for result in results:
        if result.is_contiguous():
            runtime.poison(result)
    for tensor, before in zip((tensor for tensor in read if tensor.is_cuda), kept, strict=True):
        runtime.host(tensor).copy_(before)
