"""BackwardPasses: tells reducers which backward pass of a pipeline completes which gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from plugins.hybrid_parallel.pipeline.schedule import Action, Kind
from plugins.hybrid_parallel.zero.reducer import GradientReducer


class BackwardPasses:
    """The backward passes of a batch on this rank's stages, as the reducers of a model's optimizers see them.

    Args:
        reducers: of the model's optimizers.
        parameters: the parameters of each stage of this rank.
        are_final: whether the passes complete the gradients of the step.
    """

    def __init__(
        self,
        reducers: Sequence[GradientReducer],
        parameters: Mapping[int, frozenset[nn.Parameter]],
        are_final: bool = True,
    ) -> None:
        self.reducers, self.parameters, self.are_final = reducers, parameters, are_final
        self._unfinished = set(parameters)  # stages whose gradients are not complete yet

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
                reducer.begin_pass(self.parameters[action.stage])
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
                    reducer.end_pass(self.parameters[action.stage])
            elif is_last and self.are_final and (self._unfinished or action.kind is not Kind.BACKWARD):
                reducer.complete(self._only_of(action.stage))

    def _only_of(self, stage: int) -> frozenset[nn.Parameter]:
        """Return the parameters of a stage that no unfinished stage has."""
        return self.parameters[stage].difference(*(self.parameters[other] for other in self._unfinished))
