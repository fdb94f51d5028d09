"""BackwardPasses: tells reducers which backward pass of a pipeline completes which gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins.hybrid_parallel.pipeline.schedule import Action, Kind

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


class BackwardPasses:
    """The backward passes of a batch on this rank's stages, as the reducers of a model's optimizers see them.

    Args:
        model: the boosted model.
        are_final: whether they complete the gradients of the step.
    """

    def __init__(self, model: HybridParallelModel, are_final: bool = True) -> None:
        self.model, self.are_final = model, are_final
        self.reducers = [optimizer.reducer for optimizer in model.optimizers]
        self._unfinished = set(model.runtime.stages)  # stages whose gradients are not complete yet

    def before(self, action: Action, is_last: bool) -> None:
        """Prepare for a backward pass.

        Args:
            action: the pass.
            is_last: whether it is the last one of its stage.
        """
        if action.kind is not Kind.BACKWARD:  # the second half of a split pass has no hooks
            return
        for reducer in self.reducers:
            if reducer.reduces_each_pass:
                reducer.begin_pass(self.model.runtime.stage_parameters[action.stage])
            elif is_last and self.are_final and self._unfinished == {action.stage}:
                # Hooks then tell when each gradient is complete.
                reducer.begin_final_backward()

    def after(self, action: Action, is_last: bool) -> None:
        """Reduce what a backward pass has completed; see `before`."""
        if is_last:
            self._unfinished.discard(action.stage)
        for reducer in self.reducers:
            if reducer.reduces_each_pass:
                if action.kind is not Kind.BACKWARD_INPUT:
                    reducer.end_pass(self.model.runtime.stage_parameters[action.stage])
            elif is_last and self.are_final and (self._unfinished or action.kind is not Kind.BACKWARD):
                reducer.complete(self.model.parameters_only_of(action.stage, self._unfinished))
