"""Search the layouts of a model on a number of devices, and rank those that fit by step time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.planner.costs import Prediction, TooLarge
from plugins.hybrid_parallel.planner.layout import Layout, Space
from plugins.hybrid_parallel.planner.op_recorder import TooManyOperators
from plugins.hybrid_parallel.planner.predict import Predictor

# Number of layouts, best by estimate, whose schedules are simulated.
_SIMULATED = 30


@dataclass(frozen=True)
class Rejection:
    """Layout that was rejected.

    Attributes:
        layout: name of the layout.
        reason: why it was rejected, one sentence.
        need: bytes of its fullest rank if it does not fit into memory, else None.
    """

    layout: str
    reason: str
    need: float | None = None


@dataclass(frozen=True)
class Plan:
    """Result of a search.

    Attributes:
        ranked: layouts that fit, fastest first.
        rejected: layouts that were rejected, with reasons.
    """

    ranked: Sequence[Prediction]
    rejected: Sequence[Rejection]


def search(predictor: Predictor, space: Space, count: int = _SIMULATED) -> Plan:
    """Rank the layouts of a space.

    Args:
        predictor: predicts memory and time.
        space: the layouts to rank.
        count: number of layouts, best by estimate, whose schedules are simulated; the others follow in the order of
            their estimates.
    """
    fitting: list[Prediction] = []
    rejected = [Rejection(grid, reason) for grid, reason in space.left_out()]
    for layout in space.layouts():
        try:
            fitting.append(predictor.predict(layout, exact=False, limit=predictor.device.memory))
        except TooLarge as error:
            rejected.append(Rejection(str(layout), str(error), error.need))
        except TooManyOperators:
            raise
        except ConfigurationError as error:
            rejected.append(Rejection(str(layout), str(error)))
    fitting.sort(key=_merit)
    best = [predictor.predict(each.layout) for each in fitting[:count]]
    return Plan([*sorted(best, key=_merit), *fitting[count:]], rejected)


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
