"""Background saves: at most one at a time; a failure is raised by the next call."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from booster.checkpoint import SavedCheckpoint
from booster.errors import ConfigurationError
from booster.logging import get_logger

_logger = get_logger(__name__)


class BackgroundWriter:
    """A single thread that completes saves; the interpreter waits for it at exit."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="booster-checkpoint")
        self._last: SavedCheckpoint | None = None

    def start(self, path: Path, began: float, work: Callable[[], None]) -> SavedCheckpoint:
        """Run `work` in the background; the previous save must have been finished."""

        def timed() -> float:
            work()
            return time.perf_counter() - began

        future = self._threads.submit(timed)
        future.add_done_callback(lambda done: _report(path, done))
        self._last = SavedCheckpoint(path, time.perf_counter() - began, future)
        return self._last

    def finish(self) -> None:
        """Wait for the save in progress, if any.

        Raises:
            ConfigurationError: the save failed; raised only once, here or by `wait`.
        """
        last, self._last = self._last, None
        if last is None or last.has_raised:
            return
        try:
            last.wait()
        except ConfigurationError as error:
            raise ConfigurationError(f"the asynchronous save of {last.path} failed: {error}") from error


def _report(path: Path, done: Future[float]) -> None:
    if done.exception() is not None:
        _logger.error("the checkpoint %s was not saved: %s", path, done.exception())
    else:
        _logger.info("the checkpoint %s was saved in %.2f s", path, done.result())
