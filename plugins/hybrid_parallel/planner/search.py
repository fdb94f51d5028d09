"""Search the layouts of a model on a number of devices, and rank those that fit by step time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.planner.costs import Memory, Prediction, TooLarge
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.op_recorder import TooManyOperators
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.space import Space

# Number of layouts, best by estimate, whose schedules are simulated.
_SIMULATED = 30


@dataclass(frozen=True)
class Rejection:
    """Layout that was rejected.

    Attributes:
        layout: name of the layout.
        reason: why it was rejected, one sentence.
        memory: memory of its fullest rank if it does not fit into the device, else None.
    """

    layout: str
    reason: str
    memory: Memory | None = None


@dataclass(frozen=True)
class Plan:
    """Result of a search.

    Attributes:
        ranked: layouts that fit, fastest first.
        rejected: layouts that were rejected, with reasons.
    """

    ranked: Sequence[Prediction]
    rejected: Sequence[Rejection]

    @property
    def nearest(self) -> Rejection | None:
        """The layout that lacks the least memory; None if every rejected layout has another reason."""
        large = [each for each in self.rejected if each.memory is not None]
        return min(large, key=lambda each: each.memory.needed, default=None)


def search(predictor: Predictor, space: Space, count: int = _SIMULATED) -> Plan:
    """Rank the layouts of a space; those with offload if no other fits.

    Args:
        predictor: predicts memory and time.
        space: the layouts to rank.
        count: number of layouts, best by estimate, whose schedules are simulated; the others follow in the order of
            their estimates.
    """
    rejected = [Rejection(grid, reason) for grid, reason in space.left_out()]
    fitting = _fitting(predictor, space.layouts(), rejected)
    # Offload never makes a step faster.
    fitting = fitting or _fitting(predictor, space.offloaded(), rejected)
    fitting.sort(key=_merit)
    best = [predictor.predict(each.layout) for each in fitting[:count]]
    return Plan([*sorted(best, key=_merit), *fitting[count:]], rejected)


def _fitting(predictor: Predictor, layouts: Iterable[Layout], rejected: list[Rejection]) -> list[Prediction]:
    """Return the estimates of the layouts that fit; add the others to `rejected`."""
    fitting: list[Prediction] = []
    for layout in layouts:
        try:
            fitting.append(predictor.predict(layout, exact=False, limit=predictor.device.memory))
        except TooLarge as error:
            rejected.append(Rejection(str(layout), str(error), error.memory))
        except TooManyOperators:
            raise
        except ConfigurationError as error:
            rejected.append(Rejection(str(layout), str(error)))
    return fitting


def _merit(prediction: Prediction) -> tuple:
    """Return the sort key: step time; ties prefer less memory, then the simpler layout."""
    layout: Layout = prediction.layout
    return (
        round(prediction.seconds.total, 9),
        prediction.memory.total,
        layout.tp_size * layout.pp_size,
        layout.num_chunks,
        str(layout),
    )
