"""The search space of layouts, and those of them that fit, ranked by step time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.planner.costs import Memory, Prediction, TooLarge
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.op_recorder import TooManyOperators
from plugins.hybrid_parallel.planner.predict import Predictor

RECOMPUTATIONS = (None, 0.5, "operators", "full")


@dataclass(frozen=True)
class Space:
    """Search space of layouts."""

    world_size: int  # number of devices
    global_batch: int  # samples of a step, over all replicas
    precision: str  # precision of parameters and activations
    num_layers: int  # number of layers, which limits the number of pipeline stages
    largest_tp: int = 8  # maximum tensor-parallel size; usually the number of devices of a node
    cp_sizes: tuple[int, ...] = (1,)  # context-parallel sizes
    ep_sizes: tuple[int, ...] = (1,)  # expert-parallel sizes
    # pairs (pipeline schedule, stages per rank)
    styles: tuple[tuple[str, int], ...] = (
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    )
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)  # micro-batch sizes, in samples
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # ZeRO stages, of 0 to 3
    node_size: int | None = None  # number of devices of a node; further layouts share states within nodes alone
    place: str | None = None  # where layouts offload to, "cpu" or a directory; None for layouts without offload only
    kernels: tuple[str, ...] = ()  # switches of the plugin that all layouts have

    def layouts(self) -> Iterator[Layout]:
        """Iterate over all layouts without offload, whether or not they fit into memory."""
        for tp_size, cp_size, pp_size in self._grids():
            dp_size = self.world_size // (tp_size * pp_size * cp_size)
            if self.global_batch % dp_size:
                continue
            share, replicas = self.global_batch // dp_size, dp_size * cp_size
            for (style, chunks), rows, sequence, recomputation, ep_size, (zero_stage, zero_size) in product(
                self._styles(pp_size),
                self._rows(share),
                (False, True) if tp_size > 1 else (False,),
                RECOMPUTATIONS,
                [size for size in self.ep_sizes if replicas % size == 0],
                list(self._sharing(tp_size, replicas)),
            ):
                yield Layout(
                    dp_size=dp_size,
                    tp_size=tp_size,
                    pp_size=pp_size,
                    cp_size=cp_size,
                    ep_size=ep_size,
                    sequence=sequence,
                    pp_style=style,
                    num_chunks=chunks,
                    rows=rows,
                    num_microbatches=share // rows,
                    recomputation=recomputation,
                    zero_stage=zero_stage,
                    zero_size=zero_size,
                    precision=self.precision,
                    kernels=self.kernels,
                )

    def offloaded(self) -> Iterator[Layout]:
        """Iterate over all layouts with offload of one or more kinds; none without a place."""
        if self.place is None:
            return
        for layout in self.layouts():
            for optimizer, parameters, activations in product((None, self.place), repeat=3):
                stage = 3 if parameters and layout.num_replicas == 1 else layout.zero_stage
                if (parameters is None or stage == 3) and (optimizer or parameters or activations):
                    yield replace(
                        layout,
                        zero_stage=stage,
                        offload_optimizer=optimizer,
                        offload_parameters=parameters,
                        offload_activations=activations,
                    )

    def left_out(self) -> list[tuple[str, str]]:
        """Return (mesh, reason) for each mesh whose layouts are all excluded."""
        found = []
        for tp_size, cp_size, pp_size in self._grids():
            dp_size = self.world_size // (tp_size * pp_size * cp_size)
            if self.global_batch % dp_size:
                grid = f"dp{dp_size} tp{tp_size} pp{pp_size}"
                found.append(
                    (grid, f"a global batch of {self.global_batch} samples does not divide by dp_size={dp_size}")
                )
        return found

    def cuts(self) -> list[tuple[int, bool]]:
        """Return the pairs (tensor-parallel size, whether activations are sequence-sharded) of the layouts."""
        sizes = sorted({tp_size for tp_size, _, _ in self._grids()})
        return [(size, sequence) for size in sizes for sequence in ((False, True) if size > 1 else (False,))]

    def _sharing(self, tp_size: int, replicas: int) -> Iterator[tuple[int, int | None]]:
        """Yield the pairs (ZeRO stage, ranks that share states)."""
        inside = None if self.node_size is None else self.node_size // tp_size
        if replicas == 1:  # shares nothing at any stage
            yield min(1, max(self.zero_stages)), None
            return
        for stage in self.zero_stages:
            yield stage, None
            if stage and inside is not None and 1 < inside < replicas and replicas % inside == 0:
                yield stage, inside

    def _grids(self) -> Iterator[tuple[int, int, int]]:
        for tp_size in divisors(self.world_size):
            if tp_size > self.largest_tp:
                continue
            for cp_size in self.cp_sizes:
                if self.world_size // tp_size % cp_size:
                    continue
                for pp_size in divisors(self.world_size // tp_size // cp_size):
                    if pp_size <= max(self.num_layers, 1):
                        yield tp_size, cp_size, pp_size

    def _styles(self, pp_size: int) -> list[tuple[str, int]]:
        if pp_size == 1:
            return [("1f1b", 1)]
        return [(style, chunks) for style, chunks in self.styles if pp_size * chunks <= self.num_layers]

    def _rows(self, share: int) -> list[int]:
        return [rows for rows in self.rows if share % rows == 0]


def divisors(count: int) -> list[int]:
    """Return all divisors of `count` in ascending order."""
    return [size for size in range(1, count + 1) if count % size == 0]


# Number of layouts, best by estimate, whose schedules are simulated.
_SIMULATED = 30


@dataclass(frozen=True)
class Rejection:
    """Layout that was rejected."""

    layout: str  # name of the layout
    reason: str  # why it was rejected, one sentence
    memory: Memory | None = None  # memory of its fullest rank if it does not fit into the device, else None


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    ranked: Sequence[Prediction]  # layouts that fit, fastest first
    rejected: Sequence[Rejection]  # layouts that were rejected, with reasons

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
