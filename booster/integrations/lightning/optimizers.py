"""A boosted optimizer as Lightning expects one: it is logged, and found by schedulers, as the user's."""

from __future__ import annotations

from typing import Any

from booster.wrappers import OptimizerWrapper


class NamedOptimizer(OptimizerWrapper):
    """Wrapper of a boosted optimizer with the class name of the user's, which equals that one.

    Lightning's own wrapper takes the class of what it wraps; this one hands every call on, so that it changes no state
    of the boosted optimizer's.
    """

    @staticmethod
    def of(boosted: OptimizerWrapper) -> NamedOptimizer:
        """Wrap a boosted optimizer."""
        return type(type(boosted.unwrap()).__name__, (NamedOptimizer,), {})(boosted)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.optim or other is self.optim.unwrap()

    def __hash__(self) -> int:
        return hash(self.optim)


def boosted_in(optimizer: Any) -> Any:
    """Return the boosted optimizer inside the wrappers of Trainer or Fabric."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    return optimizer.optim if isinstance(optimizer, NamedOptimizer) else optimizer
