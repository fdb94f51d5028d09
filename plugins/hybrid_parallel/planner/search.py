"""All layouts of a model on a number of devices, the fastest that fit first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.planner.costs import Prediction, TooLarge
from plugins.hybrid_parallel.planner.layout import Layout, Space
from plugins.hybrid_parallel.planner.op_recorder import TooManyOperators
from plugins.hybrid_parallel.planner.predict import Predictor

# So many of the best by estimate have their schedules simulated.
_SIMULATED = 30


@dataclass(frozen=True)
class Rejection:
    """A layout that will not do.

    Attributes:
        layout: its name.
        reason: one sentence.
        need: bytes of its fullest rank, where these are too many.
    """

    layout: str
    reason: str
    need: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes:
        ranked: layouts that fit, the fastest first.
        rejected: those that do not, and why.
    """

    ranked: Sequence[Prediction]
    rejected: Sequence[Rejection]


def search(predictor: Predictor, space: Space, count: int = _SIMULATED) -> Plan:
    """Rank the layouts of a space.

    Args:
        count: how many of the best are predicted in full; the others follow in the order of their estimates.
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
    """Time, and of equal times the less memory and the simpler layout."""
    layout: Layout = prediction.layout
    return (
        round(prediction.seconds.total, 9),
        prediction.memory.total,
        layout.tp_size * layout.pp_size,
        layout.num_chunks,
        str(layout),
    )
