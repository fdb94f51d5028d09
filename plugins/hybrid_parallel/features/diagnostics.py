"""Features that look at a training: debug mode, and the record of a pipeline's actions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plugins.hybrid_parallel.debug.nonfinite import ModuleWatch
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.features.feature import Feature
from plugins.hybrid_parallel.pipeline.timeline import ScheduleRecorder

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer


class Debug(Feature):
    """Checks every module for nan and inf, and compares what ranks must share."""

    def boosted(self, model: HybridParallelModel) -> None:
        """Watch the modules, before an optimizer's hooks take the gradients away; compare ranks from now on."""
        watch = model.trace.watch = ModuleWatch(model.unwrap())
        model.runtime.register_microbatch_hook(watch.begin_microbatch)
        model.synchrony.interval = self.config.debugging.synchrony_interval

    def after_step(self, optimizer: HybridParallelOptimizer, model: HybridParallelModel) -> None:
        """Compare the ranks."""
        if not optimizer.step_was_skipped:
            model.synchrony.run_if_due([optimizer])


class RecordedSchedule(Feature):
    """Writes the times of a pipeline's actions."""

    def boosted(self, model: HybridParallelModel) -> None:
        """Record in the model's runtime; a directory that cannot be written raises an error on all ranks."""
        directory = Path(self.config.debugging.record_schedule)
        model.runtime.recorder = raise_on_all_ranks(lambda: ScheduleRecorder(directory, model.mesh))
