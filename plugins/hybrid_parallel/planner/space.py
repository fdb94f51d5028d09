"""Search space: the layouts that a plan ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from plugins.hybrid_parallel.planner.layout import Layout

RECOMPUTATIONS = (None, 0.5, "full")


@dataclass(frozen=True)
class Space:
    """Search space of layouts.

    Attributes:
        world_size: number of devices.
        global_batch: samples of a step, over all replicas.
        precision: precision of parameters and activations.
        num_layers: number of layers, which limits the number of pipeline stages.
        largest_tp: maximum tensor-parallel size; usually the number of devices of a node.
        cp_sizes: context-parallel sizes.
        styles: pairs (pipeline schedule, stages per rank).
        rows: micro-batch sizes, in samples.
        zero_stages: ZeRO stages, of 0 to 3.
        node_size: number of devices of a node; further layouts share states within nodes alone.
        place: where layouts offload to, "cpu" or a directory; None for layouts without offload only.
    """

    world_size: int
    global_batch: int
    precision: str
    num_layers: int
    largest_tp: int = 8
    cp_sizes: tuple[int, ...] = (1,)
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
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    node_size: int | None = None
    place: str | None = None

    def layouts(self) -> Iterator[Layout]:
        """Iterate over all layouts without offload, whether or not they fit into memory."""
        for tp_size, cp_size, pp_size in self._grids():
            dp_size = self.world_size // (tp_size * pp_size * cp_size)
            if self.global_batch % dp_size:
                continue
            share = self.global_batch // dp_size
            for style, chunks in self._styles(pp_size):
                for rows in self._rows(share):
                    for sequence in (False, True) if tp_size > 1 else (False,):
                        for recomputation in RECOMPUTATIONS:
                            for zero_stage, zero_size in self._sharing(tp_size, dp_size * cp_size):
                                yield Layout(
                                    dp_size=dp_size,
                                    tp_size=tp_size,
                                    pp_size=pp_size,
                                    cp_size=cp_size,
                                    sequence=sequence,
                                    pp_style=style,
                                    num_chunks=chunks,
                                    rows=rows,
                                    num_microbatches=share // rows,
                                    recomputation=recomputation,
                                    zero_stage=zero_stage,
                                    zero_size=zero_size,
                                    precision=self.precision,
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
