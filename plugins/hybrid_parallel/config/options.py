"""Options of `HybridParallelPlugin`, validated together before any process group exists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError, check_names
from plugins.hybrid_parallel.distributed.device_mapping import check_mapping
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Schedule
from shardformer import Policy, TPInfo

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
NONFINITE = ("raise", "skip", "ignore")


@dataclass(frozen=True, kw_only=True)
class HybridParallelConfig:
    """Options of the plugin; this class is the only place that defines their defaults.

    Attributes:
        tp_size, pp_size, sp_size, cp_size, ep_size, dp_size: ranks on each axis. `dp_size` is derived from the world
            size. `sp_size` equals `tp_size`, or `cp_size`, whichever axis shares the sequence.
        zero_stage: 0 replicates optimizer states on every data-parallel rank, 1 shards them over these ranks.
        precision: dtype of parameters and activations; "fp32" keeps the model's own dtype, "fp8" is "bf16" with the
            matrix products of the layers in 8 bit.
        initial_scale, growth_interval: initial fp16 loss scale; number of steps without overflow before it doubles.
        max_norm: maximum global gradient norm, for clipping; None for no clipping.
        nonfinite: handling of a step whose gradients are nan or inf on any rank: "raise" reports where it began, "skip"
            skips the step on all ranks, "ignore" does not check. fp16 skips such steps as long as its loss scale can
            shrink.
        num_microbatches, microbatch_size: how a batch is split; give at most one. Default: one micro-batch per pipeline
            stage.
        pp_style: pipeline schedule.
        num_model_chunks: stages per rank, for interleaved schedules; None for the smallest number that interleaves
            (two).
        layers_per_stage: explicit split of the layers, one number per stage.
        expert_capacity_factor: capacity of an expert per sequence, as a multiple of an equal share of its tokens; None
            for no limit.
        enable_*: optimisations of the sharded model, see `ShardConfig`.
        gradient_checkpointing: "full" recomputes every layer in the backward pass; a fraction in (0, 1] recomputes this
            share of each stage's layers, counted from its first; "selective" recomputes the attention kernels that
            store their scores; None keeps all activations.
        custom_policy: how to shard a family that has no policy: a `Policy`, or a class of slots.
        sharding_dim: None shards weights as the family's policy says; -1 shards the output features of every linear
            layer and gathers them, 0 shards the input features and adds partial sums.
        device_mapping: device of each shard, {"stage_0": {"shard_0": "cuda:3", ...}, ...}; None for ranks in order.
        tp_info: modules to shard, by the suffixes of their names, instead of a policy.
        make_vocab_size_divisible_by: vocabularies are padded to a multiple of this times `tp_size`.
        zero_bucket_size_in_mb: size of the buckets in which gradients are reduced.
        overlap_communication: reduce gradients during the backward pass.
        overlap_allgather: all-gather updated parameters in the background until the next forward pass needs them.
        master_weights: keep fp32 copies of 16-bit parameters for the optimizer.
        seed: seed of the random streams; None for the seed that `launch` set.
        record_schedule: directory to which the times of pipeline actions are written, for `booster inspect --recorded`.
        debug: check every module for nan and inf and every collective for mismatched calls, and compare what ranks must
            share; `BOOSTER_DEBUG=1` in the environment has the same effect.
        synchrony_interval: in debug mode, number of steps between two comparisons of parameters over ranks.
    """

    tp_size: int = 1
    pp_size: int = 1
    sp_size: int | None = None
    cp_size: int = 1
    ep_size: int = 1
    dp_size: int | None = None
    zero_stage: int = 1
    precision: str = "fp32"
    initial_scale: float = 2.0**16
    growth_interval: int = 1000
    max_norm: float | None = None
    nonfinite: str = "raise"
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    pp_style: str = "1f1b"
    num_model_chunks: int | None = None
    layers_per_stage: Sequence[int] | None = None
    expert_capacity_factor: float | None = None
    enable_fused_normalization: bool = False
    enable_flash_attention: bool | str = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str = "split_gather"
    enable_sequence_overlap: bool = False
    enable_all_optimization: bool = False
    gradient_checkpointing: str | float | None = None
    custom_policy: Policy | type | None = None
    sharding_dim: int | None = None
    device_mapping: Mapping[str, Mapping[str, Any]] | None = None
    tp_info: TPInfo | None = None
    make_vocab_size_divisible_by: int = 64
    zero_bucket_size_in_mb: float = 12
    overlap_communication: bool = True
    overlap_allgather: bool = False
    master_weights: bool = True
    seed: int | None = None
    record_schedule: str | Path | None = None
    debug: bool = False
    synchrony_interval: int = 1

    def __post_init__(self) -> None:
        if self.sp_size is not None and self.cp_size == 1 and self._shares_over_context():
            object.__setattr__(self, "cp_size", self.sp_size)
        problems = [*self._check_sizes(), *self._check_choices(), *self._check_numbers(), *self._check_availability()]
        if problems:
            raise ConfigurationError("; ".join(problems))

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> HybridParallelConfig:
        """Create the configuration from keyword options.

        Raises:
            ConfigurationError: an option does not exist (the message names the closest one), or a value is invalid.
        """
        check_names(options, [field.name for field in fields(cls)], "HybridParallelPlugin")
        return cls(**options)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks in a world.

        Raises:
            ConfigurationError: the sizes do not fit the world size.
        """
        sizes = {"tp_size": self.tp_size, "pp_size": self.pp_size}
        sizes |= {"cp_size": self.cp_size} if self.cp_size > 1 else {}
        block = math.prod(sizes.values())
        if world_size % block:
            raise ConfigurationError(
                f"world size {world_size} is not a multiple of {'*'.join(sizes)}="
                f"{'*'.join(map(str, sizes.values()))}={block}; "
                f"start {-(-world_size // block) * block} ranks or choose sizes whose product divides {world_size}"
            )
        dp_size = world_size // block
        if self.dp_size is not None and self.dp_size != dp_size:
            given = " and ".join(f"{name}={size}" for name, size in sizes.items())
            raise ConfigurationError(
                f"dp_size={self.dp_size} does not fit world size {world_size} with {given}; use dp_size={dp_size}"
            )
        replicas = dp_size * self.cp_size
        if replicas % self.ep_size:
            raise ConfigurationError(
                f"ep_size={self.ep_size} does not divide the dp_size*cp_size={dp_size}*{self.cp_size}={replicas} ranks "
                f"that see other tokens; use ep_size={math.gcd(replicas, self.ep_size)}"
            )
        return dp_size

    @property
    def context_mode(self) -> str:
        """How attention accesses the tokens of the other context-parallel ranks: "all_to_all" or "ring_attn"."""
        return "all_to_all" if self.sequence_parallelism_mode == "all_to_all" else "ring_attn"

    @property
    def cuts_over_tp(self) -> bool:
        """Whether the sequence is split over the tensor-parallel ranks."""
        is_tp_mode = self.sequence_parallelism_mode == "split_gather" or self.cp_size == 1
        return self.enable_sequence_parallelism and is_tp_mode and self.tp_size > 1

    def _shares_over_context(self) -> bool:
        """Return whether `sp_size` is an alias of `cp_size`, as in ColossalAI's modes that do not shard weights."""
        mode = self.sequence_parallelism_mode
        return mode == "ring_attn" or (mode == "all_to_all" and self.sp_size not in (1, self.tp_size))

    def microbatches_of(self, num_rows: int) -> int:
        """Return the number of micro-batches that a batch of `num_rows` samples is split into."""
        if self.microbatch_size is not None:
            return -(-num_rows // self.microbatch_size)
        return min(self.num_microbatches or self.pp_size, num_rows)

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule; "1f1b" if there is a single stage."""
        return SCHEDULES[self.pp_style if self.pp_size > 1 else "1f1b"]

    @property
    def chunks_per_rank(self) -> int:
        """Number of stages per rank."""
        return self.schedule.chunks or self.num_model_chunks or 2

    @property
    def least_batch_size(self) -> int:
        """The smallest batch size that fills the requested micro-batches."""
        return self.num_microbatches or 1

    def _check_sizes(self) -> list[str]:
        problems = []
        for name in ("tp_size", "pp_size", "sp_size", "cp_size", "ep_size", "dp_size", "num_model_chunks"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                problems.append(f"{name}={value!r} is not a positive integer; use 1 or more")
        if self.sp_size is not None and self.sp_size not in (1, self.tp_size, self.cp_size):
            problems.append(f"sp_size={self.sp_size} differs from tp_size={self.tp_size}; use sp_size={self.tp_size}")
        return problems

    def _check_choices(self) -> list[str]:
        choices: dict[str, tuple[Any, ...]] = {
            "zero_stage": (0, 1),
            "precision": PRECISIONS,
            "nonfinite": NONFINITE,
            "pp_style": tuple(SCHEDULES),
            "sharding_dim": (None, 0, -1),
            "sequence_parallelism_mode": ("split_gather", "all_to_all", "ring_attn"),
        }
        return [
            f"{name}={getattr(self, name)!r} is not available; use {' or '.join(repr(choice) for choice in allowed)}"
            for name, allowed in choices.items()
            if getattr(self, name) not in allowed
        ]

    def _check_numbers(self) -> list[str]:
        problems = self._check_chunks() + self._check_mapping()
        share = self.gradient_checkpointing
        is_share = isinstance(share, float | int) and not isinstance(share, bool) and 0 < share <= 1
        if share not in (None, "full", "selective") and not is_share:
            problems.append(
                f"gradient_checkpointing={share!r} is not available; use None, 'full', 'selective' or a share of "
                "layers such as 0.5"
            )
        if self.num_microbatches is not None and self.microbatch_size is not None:
            problems.append("num_microbatches and microbatch_size are both given; use one of them")
        positive = (
            "num_microbatches",
            "microbatch_size",
            "initial_scale",
            "growth_interval",
            "max_norm",
            "expert_capacity_factor",
        )
        for name in (*positive, "zero_bucket_size_in_mb", "make_vocab_size_divisible_by", "synchrony_interval"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                problems.append(f"{name}={value} is not positive; use a value above 0")
        return problems

    def _check_mapping(self) -> list[str]:
        cut_by = f"cp_size={self.cp_size}" if self.cp_size != 1 else "enable_sequence_parallelism=True"
        if self.sharding_dim is not None and (self.enable_sequence_parallelism or self.cp_size != 1):
            return [
                f"sharding_dim={self.sharding_dim} does not split activations, and {cut_by} cuts them; use one of them"
            ]
        if self.device_mapping is None:
            return []
        if self.cp_size != 1:
            return ["device_mapping places stages and shards, not parts of sequences; use cp_size=1 or no mapping"]
        return check_mapping(self.device_mapping, self.pp_size, self.tp_size)

    def _check_chunks(self) -> list[str]:
        schedule, chunks = SCHEDULES.get(self.pp_style), self.num_model_chunks
        if schedule is None or chunks is None:
            return []
        if schedule.chunks not in (None, chunks):
            chosen = " or ".join(repr(name) for name, each in SCHEDULES.items() if each.chunks is None)
            return [
                f"num_model_chunks={chunks} does not fit pp_style={self.pp_style!r}, which has {schedule.chunks} a "
                f"rank; leave it out, or use pp_style={chosen}"
            ]
        if schedule.chunks is None and chunks < schedule.least_chunks:
            least = schedule.least_chunks
            return [f"pp_style={self.pp_style!r} needs {least} model chunks or more; use num_model_chunks={least}"]
        return []

    def _check_availability(self) -> list[str]:
        problems = []
        if self.enable_sequence_overlap and not self.enable_sequence_parallelism:
            problems.append("enable_sequence_overlap=True needs enable_sequence_parallelism=True; use it, or False")
        if self.expert_capacity_factor is not None and self.cp_size != 1:
            problems.append(
                f"expert_capacity_factor={self.expert_capacity_factor} needs whole sequences, which "
                f"cp_size={self.cp_size} cuts; use cp_size=1 or expert_capacity_factor=None"
            )
        given = [name for name in ("custom_policy", "sharding_dim", "tp_info") if getattr(self, name) is not None]
        if len(given) > 1:
            problems.append(f"{' and '.join(given)} each say how weights are cut; use one of them")
        if self.tp_info is not None and not isinstance(self.tp_info, TPInfo):
            problems.append(f"tp_info is a {type(self.tp_info).__name__}; use shardformer.TPInfo()")
        if self.enable_sequence_parallelism and self.cp_size == 1:
            if self.sequence_parallelism_mode == "ring_attn":
                problems.append(
                    "sequence_parallelism_mode='ring_attn' needs cp_size > 1; use cp_size=2 or another mode"
                )
            elif self.tp_size == 1:
                problems.append("enable_sequence_parallelism=True needs tp_size > 1; use tp_size=2 or switch it off")
        return problems
