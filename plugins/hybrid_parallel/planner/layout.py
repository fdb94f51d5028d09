"""Parallel layouts, and the space of layouts that a plan chooses from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plugins.hybrid_parallel.config.options import HybridParallelConfig

RECOMPUTATIONS = (None, 0.5, "full")


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a training job.

    Attributes:
        dp_size, tp_size, pp_size, cp_size: number of ranks on each axis.
        sequence: whether activations are sharded along the sequence over the tensor-parallel ranks.
        pp_style, num_chunks: pipeline schedule, and number of stages per rank.
        rows: samples of a micro-batch.
        num_microbatches: micro-batches of a step, for each replica.
        recomputation: value of the option `gradient_checkpointing`.
        zero_stage: 0 or 1.
        precision: precision of parameters and activations.
    """

    dp_size: int
    tp_size: int
    pp_size: int
    cp_size: int = 1
    sequence: bool = False
    pp_style: str = "1f1b"
    num_chunks: int = 1
    rows: int = 1
    num_microbatches: int = 1
    recomputation: str | float | None = None
    zero_stage: int = 1
    precision: str = "bf16"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_size * self.tp_size * self.pp_size * self.cp_size

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages over all ranks of a pipeline."""
        return self.pp_size * self.num_chunks

    def options(self) -> dict[str, Any]:
        """Return the options of `HybridParallelPlugin`: the mesh sizes, and all that differ from the defaults."""
        options: dict[str, Any] = {
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "dp_size": self.dp_size,
            "num_microbatches": self.num_microbatches,
            "zero_stage": self.zero_stage,
            "precision": self.precision,
        }
        if self.cp_size > 1:
            options["cp_size"] = self.cp_size
        if self.pp_size > 1:
            options["pp_style"] = self.pp_style
            if self.pp_style in ("interleaved", "zero_bubble"):
                options["num_model_chunks"] = self.num_chunks
        if self.sequence:
            options["enable_sequence_parallelism"] = True
        if self.recomputation is not None:
            options["gradient_checkpointing"] = self.recomputation
        return options

    @cached_property
    def config(self) -> HybridParallelConfig:
        """The layout as validated options.

        Raises:
            ConfigurationError: this version does not support the layout.
        """
        return HybridParallelConfig.from_options(**self.options())

    def description(self) -> dict[str, Any]:
        """Return the JSON form that `HybridParallelPlugin.from_config` reads."""
        options = self.options()
        sizes = {"sharding_size": options.pop("tp_size"), "stage_cnt": options.pop("pp_size")}
        return {"mode": "hybrid", **sizes, "accum_degree": options.pop("num_microbatches"), **options}

    def __str__(self) -> str:
        words = [f"dp{self.dp_size} tp{self.tp_size}" + ("+sp" if self.sequence else "")]
        if self.cp_size > 1:
            words.append(f"cp{self.cp_size}")
        words.append(f"pp{self.pp_size}")
        if self.pp_size > 1:
            words.append(self.pp_style + (f" x{self.num_chunks}" if self.num_chunks > 1 else ""))
        words.append(f"micro {self.num_microbatches}x{self.rows}")
        if self.recomputation is not None:
            words.append(f"recompute {self.recomputation}")
        return " ".join([*words, f"zero{self.zero_stage}"])


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
        zero_stages: ZeRO stages, 0, 1 or both.
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
    zero_stages: tuple[int, ...] = (0, 1)

    def layouts(self) -> Iterator[Layout]:
        """Iterate over all layouts, whether or not they fit into memory."""
        for tp_size, cp_size, pp_size in self._grids():
            dp_size = self.world_size // (tp_size * pp_size * cp_size)
            if self.global_batch % dp_size:
                continue
            share = self.global_batch // dp_size
            for style, chunks in self._styles(pp_size):
                for rows in self._rows(share):
                    for sequence in (False, True) if tp_size > 1 else (False,):
                        for recomputation in RECOMPUTATIONS:
                            for zero_stage in self.zero_stages if dp_size > 1 else (max(self.zero_stages),):
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
                                    precision=self.precision,
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
