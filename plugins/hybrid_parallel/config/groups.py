"""Groups of options: ranks, policy and pipeline, kernels and precision, gradients and optimizer states, offload."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.option_group import (
    COUNT,
    SWITCH,
    OptionGroup,
    Rule,
    is_integer,
    is_number,
    not_negative,
    one_of,
    option,
    positive,
)
from plugins.hybrid_parallel.distributed.mesh import check_mapping
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Schedule
from shardformer.attention.backend import NAMES
from shardformer.policies.base import Policy
from shardformer.policies.user_forms import TPInfo

DEVICE_MAPPING = Rule(
    ((lambda value: isinstance(value, Mapping), "is no mapping; use {'stage_0': {'shard_0': 'cuda:0'}}"),),
    {"stage_0": {"shard_0": "cuda:0"}},
)
LAYOUTS = Rule(
    (
        (
            lambda value: callable(value) or (isinstance(value, Sequence) and not isinstance(value, str)),
            "is no list of layouts; use [{'tp_size': 1, 'pp_size': 3}], or a function of the number of ranks",
        ),
        (
            lambda value: callable(value) or all(isinstance(each, Mapping) for each in value),
            "is no list of mappings; use [{'tp_size': 1, 'pp_size': 3}]",
        ),
    ),
    [{"tp_size": 1, "pp_size": 3}],
)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(OptionGroup):
    """Sizes of the mesh.

    Attributes:
        tp_size: tensor-parallel ranks, which share every large weight.
        pp_size: pipeline-parallel ranks, which share the layers.
        sp_size: ranks that share a sequence: equal to `tp_size`, or to `cp_size`, by the mode.
        cp_size: context-parallel ranks, each with a part of every sequence.
        ep_size: expert-parallel ranks, each with a part of the experts; divides `dp_size * cp_size`.
        dp_size: data-parallel replicas; derived from the world size, and checked if it is given.
        enable_sequence_parallelism: split activations along the sequence, over the axis that the mode implies.
        sequence_parallelism_mode: "split_gather" or "all_to_all" over `tp_size`; "ring_attn" or "all_to_all" over
            `cp_size`.
        elastic_layouts: layouts for fewer ranks than an elastic job's `--max-ranks`, as mappings of options: a list, of
            which the first that fits is taken, or a function of the number of ranks; None for the planner's choice.
        device_mapping: device of each shard, {"stage_0": {"shard_0": "cuda:3", ...}, ...}; None for ranks in order.
    """

    tp_size: int = option(1, COUNT)
    pp_size: int = option(1, COUNT)
    sp_size: int | None = option(None, COUNT)
    cp_size: int = option(1, COUNT)
    ep_size: int = option(1, COUNT)
    dp_size: int | None = option(None, COUNT)
    enable_sequence_parallelism: bool = option(False, SWITCH)
    sequence_parallelism_mode: str = option("split_gather", one_of("split_gather", "all_to_all", "ring_attn"))
    elastic_layouts: Sequence[Mapping[str, Any]] | Callable[[int], Mapping[str, Any]] | None = option(None, LAYOUTS)
    device_mapping: Mapping[str, Mapping[str, Any]] | None = option(None, DEVICE_MAPPING)

    def __post_init__(self) -> None:
        if self.sp_size is not None and self.cp_size == 1 and self._shares_over_context():
            object.__setattr__(self, "cp_size", self.sp_size)

    def _shares_over_context(self) -> bool:
        """Return whether `sp_size` is an alias of `cp_size`, as in ColossalAI's modes that do not shard weights."""
        mode = self.sequence_parallelism_mode
        return mode == "ring_attn" or (mode == "all_to_all" and self.sp_size not in (1, self.tp_size))

    @property
    def context_mode(self) -> str:
        """How attention accesses the tokens of the other context-parallel ranks: "all_to_all" or "ring_attn"."""
        return "all_to_all" if self.sequence_parallelism_mode == "all_to_all" else "ring_attn"

    @property
    def cuts_over_tp(self) -> bool:
        """Whether the sequence is split over the tensor-parallel ranks."""
        is_tp_mode = self.sequence_parallelism_mode == "split_gather" or self.cp_size == 1
        return self.enable_sequence_parallelism and is_tp_mode and self.tp_size > 1

    def mesh_shape(self, world_size: int) -> tuple[int, int, int, int]:
        """Return the sizes of the axes (pp, dp, cp, tp) in a world.

        Raises:
            ConfigurationError: the sizes do not fit the world size.
        """
        return self.pp_size, self.data_parallel_size(world_size), self.cp_size, self.tp_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks in a world."""
        sizes = {"tp_size": self.tp_size, "pp_size": self.pp_size}
        sizes |= {"cp_size": self.cp_size} if self.cp_size > 1 else {}
        block = math.prod(sizes.values())
        if world_size % block:
            raise ConfigurationError(
                f"world size {world_size} is not a multiple of {'*'.join(sizes)}="
                f"{'*'.join(map(str, sizes.values()))}={block}; "
                f"start {(ranks := -(-world_size // block) * block)} ranks by `booster run --nproc-per-node {ranks} "
                f"script.py`, or choose sizes whose product divides {world_size}"
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

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        problems = []
        if self.sp_size is not None and self.sp_size > 1 and self.sp_size not in (self.tp_size, self.cp_size):
            problems.append(f"sp_size={self.sp_size} differs from tp_size={self.tp_size}; use sp_size={self.tp_size}")
        if self.device_mapping is not None and self.cp_size != 1:
            problems.append(
                "device_mapping places stages and shards, not parts of sequences; use cp_size=1 or no mapping"
            )
        elif self.device_mapping is not None and min(self.pp_size, self.tp_size) > 0:
            problems += check_mapping(self.device_mapping, self.pp_size, self.tp_size)
        if self.enable_sequence_parallelism and self.cp_size == 1:
            if self.sequence_parallelism_mode == "ring_attn":
                problems.append(
                    "sequence_parallelism_mode='ring_attn' needs cp_size > 1; use cp_size=2 or another mode"
                )
            elif self.tp_size == 1:
                problems.append("enable_sequence_parallelism=True needs tp_size > 1; use tp_size=2 or switch it off")
        return problems


def _is_policy(value: Any) -> bool:
    if not isinstance(value, type):
        return isinstance(value, Policy)
    return issubclass(value, Policy) or hasattr(value, "argument_policy")


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(OptionGroup):
    """How weights are sharded.

    Attributes:
        custom_policy: how to shard a family that has no policy: a `Policy`, or a class of slots.
        tp_info: modules to shard, by the suffixes of their names, instead of a policy.
        sharding_dim: None shards weights as the family's policy says; -1 shards the output features of every linear
            layer and gathers them, 0 shards the input features and adds partial sums.
        make_vocab_size_divisible_by: vocabularies are padded to a multiple of this times `tp_size`.
        expert_capacity_factor: capacity of an expert per sequence, as a multiple of an equal share of its tokens; None
            for no limit.
        expert_rank_capacity_factor: rows that ranks exchange under `ep_size`, as a multiple of an equal share; a step
            with more is not finite. None for as many as there are, for which the host waits in each layer.
        moe_router_bias_update_rate: by which the biases of routers move after each step, against the load of experts; 0
            leaves them.
        count_expert_load: count the tokens of each expert, for `model.expert_load()`.
    """

    custom_policy: Policy | type | None = option(
        None, Rule(((_is_policy, "is not a policy; use a Policy, or a class with argument_policy"),), Policy)
    )
    tp_info: TPInfo | None = option(
        None, Rule(((lambda value: isinstance(value, TPInfo), "use shardformer.TPInfo()"),), TPInfo(), False)
    )
    sharding_dim: int | None = option(None, one_of(None, 0, -1))
    make_vocab_size_divisible_by: int = option(64, positive(64))
    expert_capacity_factor: float | None = option(None, positive(1.25))
    expert_rank_capacity_factor: float | None = option(None, positive(1.5))
    moe_router_bias_update_rate: float = option(0.0, not_negative(0.001))
    count_expert_load: bool = option(False, SWITCH)

    @property
    def counts_experts(self) -> bool:
        """Whether the tokens of each expert are counted."""
        return self.count_expert_load or self.moe_router_bias_update_rate > 0

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        given = [name for name in ("custom_policy", "sharding_dim", "tp_info") if getattr(self, name) is not None]
        return [f"{' and '.join(given)} each say how weights are cut; use one of them"] if len(given) > 1 else []


_SPLIT = "is no list of positive integers; use one number for each stage, as in [3, 5]"


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(OptionGroup):
    """How a batch is split into micro-batches, and how they go through the stages.

    Attributes:
        num_microbatches: number of parts that a batch is split into; None for one per pipeline stage.
        microbatch_size: number of samples in a micro-batch, instead of their number.
        pp_style: pipeline schedule: "1f1b", "gpipe", "interleaved", "zero_bubble", "zbv" or "dualpipev".
        num_model_chunks: stages per rank, for interleaved schedules; None for the smallest number that interleaves
            (two).
        layers_per_stage: explicit split of the layers, one number per stage.
        contrastive: which samples a contrastive loss, as CLIP's, compares: those of the "global" batch, or those of
            each "replica" alone, as DistributedDataParallel does.
    """

    num_microbatches: int | None = option(None, positive(4))
    microbatch_size: int | None = option(None, positive(4))
    pp_style: str = option("1f1b", one_of(*SCHEDULES))
    num_model_chunks: int | None = option(None, COUNT)
    layers_per_stage: Sequence[int] | None = option(
        None,
        Rule(
            (
                (lambda value: isinstance(value, Sequence) and all(map(is_integer, value)), _SPLIT),
                (lambda value: all(number >= 1 for number in value), _SPLIT),
            ),
            [3, 5],
        ),
    )

    contrastive: str = option("global", one_of("global", "replica"))

    def microbatches_of(self, num_rows: int, pp_size: int) -> int:
        """Return the number of micro-batches that a batch of `num_rows` samples is split into."""
        if self.microbatch_size is not None:
            return -(-num_rows // self.microbatch_size)
        return min(self.num_microbatches or pp_size, num_rows)

    def schedule_of(self, pp_size: int) -> Schedule:
        """Return the pipeline schedule; "1f1b" if there is a single stage."""
        return SCHEDULES[self.pp_style if pp_size > 1 else "1f1b"]

    def chunks_per_rank(self, pp_size: int) -> int:
        """Return the number of stages per rank."""
        return self.schedule_of(pp_size).chunks or self.num_model_chunks or 2

    @property
    def least_batch_size(self) -> int:
        """The smallest batch size that fills the requested micro-batches."""
        return self.num_microbatches or 1

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        problems, schedule, chunks = [], SCHEDULES.get(self.pp_style), self.num_model_chunks
        if schedule is not None and chunks is not None and chunks >= 1:
            if schedule.chunks not in (None, chunks):
                chosen = " or ".join(repr(name) for name, each in SCHEDULES.items() if each.chunks is None)
                problems.append(
                    f"num_model_chunks={chunks} does not fit pp_style={self.pp_style!r}, which has {schedule.chunks} a "
                    f"rank; leave it out, or use pp_style={chosen}"
                )
            elif schedule.chunks is None and chunks < (least := schedule.least_chunks):
                problems.append(
                    f"pp_style={self.pp_style!r} needs {least} model chunks or more; use num_model_chunks={least}"
                )
        if self.num_microbatches is not None and self.microbatch_size is not None:
            problems.append("num_microbatches and microbatch_size are both given; use one of them")
        return problems


_CHOICES = ("full", "operators", "selective")
_RECOMPUTED = "is not available; use None, 'full', 'operators', 'selective' or a share of layers such as 0.5"
_BACKENDS = f"is not an attention backend; use True, False or one of {', '.join(NAMES)}"


@dataclass(frozen=True, kw_only=True)
class KernelOptions(OptionGroup):
    """Optimisations of the sharded model that leave its results as they are.

    Attributes:
        enable_fused_normalization: use fused kernels for layer and RMS norms.
        enable_flash_attention: True for the fastest attention kernel that applies, or the name of one.
        enable_jit_fused: use fused elementwise operators.
        enable_sequence_overlap: overlap the communication of sequence parallelism with matrix products.
        enable_all_optimization: enable every optimisation that is available.
        gradient_checkpointing: "full" recomputes every layer in the backward pass; a fraction in (0, 1] recomputes this
            share of each stage's layers, counted from its first; "operators" saves the results of each layer's matrix
            products and attention, and recomputes the rest; "selective" recomputes the attention kernels that store
            their scores; None keeps all activations.
        tiled_mlp: compute feed-forwards in tiles of tokens, and recompute each tile in the backward pass.
        compile_layers: compile each layer with `torch.compile`; off by default, because no GPU has measured it.
        cuda_graphs: record each compiled layer as a CUDA graph; no GPU has replayed one.
    """

    enable_fused_normalization: bool = option(False, SWITCH)
    enable_flash_attention: bool | str = option(
        False,
        Rule(
            (
                (lambda value: isinstance(value, bool | str), _BACKENDS),
                (lambda value: isinstance(value, bool) or value in NAMES, _BACKENDS),
            ),
            "sdpa",
        ),
    )
    enable_jit_fused: bool = option(False, SWITCH)
    enable_sequence_overlap: bool = option(False, SWITCH)
    enable_all_optimization: bool = option(False, SWITCH)
    gradient_checkpointing: str | float | None = option(
        None,
        Rule(
            (
                (lambda value: isinstance(value, str) or is_number(value), _RECOMPUTED),
                (
                    lambda value: value in ("full", "operators", "selective") or (is_number(value) and 0 < value <= 1),
                    _RECOMPUTED,
                ),
            ),
            0.5,
        ),
    )
    tiled_mlp: bool = option(False, SWITCH)
    compile_layers: bool = option(False, SWITCH)
    cuda_graphs: bool = option(False, SWITCH)


PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(OptionGroup):
    """In which dtypes the model is trained.

    Attributes:
        precision: dtype of parameters and activations; "fp32" keeps the model's own dtype, "fp8" is "bf16" with the
            matrix products of the layers in 8 bit, which on one H100 was 0.72 times as fast for a Llama 1B.
        fp8_recipe: what has a scale of its own under "fp8": a matrix ("tensorwise"), a row ("rowwise"), or 32 values of
            one ("mxfp8").
        initial_scale: loss scale of the first fp16 step.
        growth_interval: number of fp16 steps without overflow before the loss scale doubles.
        master_weights: keep fp32 copies of 16-bit parameters for the optimizer.
    """

    precision: str = option("fp32", one_of(*PRECISIONS))
    fp8_recipe: str = option("tensorwise", one_of("tensorwise", "rowwise", "mxfp8"))
    initial_scale: float = option(2.0**16, positive(2.0**16))
    growth_interval: int = option(1000, positive(1000))
    master_weights: bool = option(True, SWITCH)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of parameters in training; None for the model's own."""
        return _DTYPES.get(self.precision)


# Buckets of the default size, in MiB. On a CPU a bucket should stay in the caches. On a GPU each collective has to fill
# the network; 128 MiB is within what DeepSpeed and Megatron-Core use, and has not been measured here.
_BUCKETS = {"cpu": 12.0, "cuda": 128.0}


@dataclass(frozen=True, kw_only=True)
class ZeroOptions(OptionGroup):
    """How replicas reduce gradients, clip them, and share optimizer states.

    Attributes:
        zero_stage: 0 replicates optimizer states on every data-parallel rank, 1 shards them over these ranks. With 2
            the gradients of every micro-batch are reduced by themselves, and a rank keeps only its shard of their sum.
            With 3 a rank keeps only its shard of parameters too, and gathers those of a layer while it uses them.
        zero_size: number of neighbouring replicas that share the states, such as those of a machine; the other replicas
            repeat them (hybrid sharding). It divides `dp_size * cp_size`; None for all replicas.
        max_norm: maximum global gradient norm, for clipping; None for no clipping.
        zero_bucket_size_in_mb: size of the buckets in which gradients are reduced; None for 12 on CPUs, 128 on GPUs.
        overlap_communication: reduce gradients during the backward pass.
        overlap_allgather: all-gather updated parameters in the background until the next forward pass needs them; views
            of parameters that a script keeps, such as `weight.data`, must not be read before.
    """

    zero_stage: int = option(1, one_of(0, 1, 2, 3))
    zero_size: int | None = option(None, COUNT)
    # inf is allowed: it measures the norm and clips nothing.
    max_norm: float | None = option(
        None,
        Rule(
            (
                (is_number, "is not a number; use one such as 1.0"),
                (lambda value: value > 0, "is not positive; use a value above 0"),
            ),
            1.0,
        ),
    )
    zero_bucket_size_in_mb: float | None = option(None, positive(12.0))
    overlap_communication: bool = option(True, SWITCH)
    overlap_allgather: bool = option(False, SWITCH)

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        if self.zero_size is None or self.zero_stage > 0:
            return []
        return [f"zero_size={self.zero_size} does not fit zero_stage=0, which shards nothing; use zero_stage=1 or more"]

    def num_shards(self, num_replicas: int) -> int:
        """Return the number of shards of the optimizer states.

        Args:
            num_replicas: data-parallel times context-parallel ranks.
        """
        if self.zero_stage == 0:
            return 1
        if self.zero_size is not None and num_replicas % self.zero_size:
            sizes = [size for size in range(1, num_replicas + 1) if num_replicas % size == 0]
            raise ConfigurationError(
                f"zero_size={self.zero_size} does not divide the {num_replicas} replicas (dp_size*cp_size); use "
                f"{' or '.join(map(str, sizes))}"
            )
        return self.zero_size or num_replicas

    def bucket_bytes(self, device_type: str) -> int:
        """Return the upper limit of a bucket's gradients in bytes, for ranks on "cpu" or "cuda"."""
        size = self.zero_bucket_size_in_mb
        return int((_BUCKETS.get(device_type, _BUCKETS["cpu"]) if size is None else size) * 2**20)


CPU = "cpu"
_PLACE = Rule(
    (
        (lambda value: isinstance(value, str | os.PathLike), "is no place; use 'cpu', or a directory"),
        (lambda value: bool(str(value).strip()), "is no place; use 'cpu', or a directory"),
    ),
    CPU,
)


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(OptionGroup):
    """Where states are between their uses: `"cpu"` for the memory of the machine, or a directory.

    In a directory every rank has a file without a name, which is gone with its process. On a CPU `"cpu"` changes
    nothing.

    Attributes:
        offload_optimizer: place of optimizer states, master weights and reduced gradients; the step runs there.
        offload_parameters: place of the shards of parameters; needs `zero_stage=3`.
        offload_activations: place of what layers save for the backward pass.
    """

    offload_optimizer: str | Path | None = option(None, _PLACE)
    offload_parameters: str | Path | None = option(None, _PLACE)
    offload_activations: str | Path | None = option(None, _PLACE)

    def moves_parameters(self, device_type: str) -> bool:
        """Return whether shards of parameters are elsewhere than on their device."""
        place = self.offload_parameters
        return directory_of(place) is not None or (place is not None and device_type == "cuda")


def directory_of(place: str | Path | None) -> Path | None:
    """Return the directory that an option names; None for the memory of the machine, and for no offload."""
    return None if place is None or place == CPU else Path(place)
