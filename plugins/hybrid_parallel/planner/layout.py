"""Parallel layouts that a plan chooses from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from shardformer.shard_spec import EXPERTS, TENSOR


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a training job."""

    # dp_size, tp_size, pp_size, cp_size: number of ranks on each axis
    dp_size: int
    tp_size: int
    pp_size: int
    cp_size: int = 1
    ep_size: int = 1  # number of neighbouring replicas that share the experts
    sequence: bool = False  # whether activations are sharded along the sequence over the tensor-parallel ranks
    # pp_style, num_chunks: pipeline schedule, and number of stages per rank
    pp_style: str = "1f1b"
    num_chunks: int = 1
    rows: int = 1  # samples of a micro-batch
    num_microbatches: int = 1  # micro-batches of a step, for each replica
    recomputation: str | float | None = None  # value of the option `gradient_checkpointing`
    zero_stage: int = 1  # 0 to 3
    zero_size: int | None = None  # ranks that share the optimizer states; None for all that hold the same parameters
    # offload_optimizer, offload_parameters, offload_activations: None, "cpu" or a directory, where these are between
    # their uses
    offload_optimizer: str | None = None
    offload_parameters: str | None = None
    offload_activations: str | None = None
    precision: str = "bf16"  # precision of parameters and activations
    kernels: tuple[str, ...] = ()  # further switches of the plugin

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_size * self.tp_size * self.pp_size * self.cp_size

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same parameters and see other tokens."""
        return self.dp_size * self.cp_size

    @property
    def num_shards(self) -> int:
        """Number of ranks that share the optimizer states."""
        return self.config.zero.num_shards(self.num_replicas)

    @cached_property
    def replicas(self) -> Mapping[str, int]:
        """Number of ranks that hold the same parameters, by the axis over which these are cut."""
        return {TENSOR: self.num_replicas, EXPERTS: self.num_replicas // self.ep_size}

    @cached_property
    def shards(self) -> Mapping[str, int]:
        """Number of ranks that share the states of parameters, by that axis."""
        return {axis: gcd(self.num_shards, count) for axis, count in self.replicas.items()}

    @cached_property
    def strides(self) -> Mapping[str, int]:
        """Distance between neighbours of these ranks, by that axis."""
        return {TENSOR: self.tp_size, EXPERTS: self.tp_size * self.ep_size}

    @property
    def offloads(self) -> bool:
        """Whether anything is kept outside of the devices."""
        return any((self.offload_optimizer, self.offload_parameters, self.offload_activations))

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
            **dict.fromkeys(self.kernels, True),
        }
        if self.cp_size > 1:
            options["cp_size"] = self.cp_size
        if self.ep_size > 1:
            options["ep_size"] = self.ep_size
        if self.pp_size > 1:
            options["pp_style"] = self.pp_style
            if self.pp_style in ("interleaved", "zero_bubble"):
                options["num_model_chunks"] = self.num_chunks
        if self.sequence:
            options["enable_sequence_parallelism"] = True
        if self.recomputation is not None:
            options["gradient_checkpointing"] = self.recomputation
        further = ("zero_size", "offload_optimizer", "offload_parameters", "offload_activations")
        return options | {name: getattr(self, name) for name in further if getattr(self, name) is not None}

    @cached_property
    def config(self) -> HybridParallelConfig:
        """The layout as validated options; raises ConfigurationError if this version does not support the layout."""
        return HybridParallelConfig.from_options(**self.options())

    def description(self) -> dict[str, Any]:
        """Return the JSON form that `HybridParallelPlugin.from_config` reads."""
        options = self.options()
        sizes = {"sharding_size": options.pop("tp_size"), "stage_cnt": options.pop("pp_size")}
        return {"mode": "hybrid", **sizes, "accum_degree": options.pop("num_microbatches"), **options}

    def __str__(self) -> str:
        words = [f"dp{self.dp_size} tp{self.tp_size}" + ("+sp" if self.sequence else "")]
        words += [f"{axis}{size}" for axis, size in (("cp", self.cp_size), ("ep", self.ep_size)) if size > 1]
        words.append(f"pp{self.pp_size}")
        if self.pp_size > 1:
            words.append(self.pp_style + (f" x{self.num_chunks}" if self.num_chunks > 1 else ""))
        words.append(f"micro {self.num_microbatches}x{self.rows}")
        if self.recomputation is not None:
            words.append(f"recompute {self.recomputation}")
        words.append(f"zero{self.zero_stage}" + ("" if self.zero_size is None else f"/{self.zero_size}"))
        places = {
            "optimizer": self.offload_optimizer,
            "parameters": self.offload_parameters,
            "activations": self.offload_activations,
        }
        words += [f"{what} to {place}" for what, place in places.items() if place is not None]
        return " ".join(words)
