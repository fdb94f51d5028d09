"""ShardConfig: the options for sharding a model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardformer.context_parallel.zigzag import ZigzagSharding
from shardformer.distributed.blocks import blocks_of, num_parts
from shardformer.distributed.sequence_parallel import BlockedSequence, SequenceParallel
from shardformer.shard_spec import ShardSpec
from shardformer.stages.stage import PipelineStageManager

SequenceMode = Literal["split_gather", "all_to_all", "ring_attn"]


@dataclass
class ShardConfig:
    """Options of `ShardFormer`.

    Attributes:
        tensor_parallel_process_group: the tensor-parallel group; None for the default group.
        pipeline_stage_manager: the pipeline stages of this rank; None without pipeline parallelism.
        context_parallel_process_group: the ranks that split each sequence; None if every rank has full sequences.
        context_parallel_mode: how attention reads the tokens of other context-parallel ranks, `ring_attn` or
            `all_to_all`.
        enable_tensor_parallelism: whether to shard weights over the tensor-parallel group.
        enable_fused_normalization: whether to use fused kernels for layer and RMS norms.
        enable_flash_attention: True for the fastest attention backend that is applicable, or the name of a backend.
        enable_jit_fused: whether to use fused elementwise operators.
        enable_sequence_overlap: whether to overlap sequence-parallel communication with matrix multiplications.
        enable_sequence_parallelism: whether to shard activations between tensor-parallel regions along the sequence.
        enable_all_optimization: whether to enable every optimization that is available.
        inference_only: only forward passes will run; the model is put in evaluation mode, without gradients.
        sequence_parallelism_mode: `split_gather` between tensor-parallel regions with sharded weights, or `all_to_all`
            around attention with replicated weights.
        compute_dtype: the dtype that the model will run in, if it differs from the current one.
        sharding_dim: None pairs column- and row-parallel layers as the family's policy specifies. -1 shards the output
            features of every linear layer and gathers them; 0 shards the input features and sums the partial results.
            With -1 and 0 the activations between layers are not sharded.
        expert_parallel_process_group: the ranks that hold different experts and process different tokens; None if
            every rank holds all experts.
        expert_capacity_factor: an expert takes at most this multiple of an equal share of a sequence's tokens, see
            `shardformer.layers.experts`; None for no limit.
        expert_rank_capacity_factor: how many rows ranks send to each one, as a multiple of an equal share, without
            waiting for the device; None for as many as there are.
        device: the device that the model will run on; None for the GPU that its parameters are on, else this process's
            GPU if the process group can use it, else the CPU.
        make_vocab_size_divisible_by: vocabularies are padded to a multiple of this value times the number of ranks.

    Raises:
        ValueError: an option is not available, or options exclude each other.
    """

    tensor_parallel_process_group: ProcessGroup | None = None
    pipeline_stage_manager: PipelineStageManager | None = None
    enable_tensor_parallelism: bool = True
    enable_fused_normalization: bool = False
    enable_flash_attention: bool | str = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    enable_sequence_overlap: bool = False
    enable_all_optimization: bool = False
    inference_only: bool = False
    sequence_parallelism_mode: SequenceMode = "split_gather"
    make_vocab_size_divisible_by: int = 64
    compute_dtype: torch.dtype | None = None
    sharding_dim: Literal[0, -1] | None = None
    context_parallel_process_group: ProcessGroup | None = None
    context_parallel_mode: Literal["ring_attn", "all_to_all"] = "ring_attn"
    expert_parallel_process_group: ProcessGroup | None = None
    expert_capacity_factor: float | None = None
    expert_rank_capacity_factor: float | None = None
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if self.enable_sequence_parallelism and self.sequence_parallelism_mode not in ("split_gather", "all_to_all"):
            raise ValueError(
                f"sequence_parallelism_mode='{self.sequence_parallelism_mode}' does not shard over the tensor-parallel "
                "ranks; use 'split_gather' or 'all_to_all', or context_parallel_process_group"
            )
        if self.make_vocab_size_divisible_by < 1:
            raise ValueError(
                f"make_vocab_size_divisible_by={self.make_vocab_size_divisible_by} must be positive; use 64"
            )
        if self.enable_all_optimization:
            self.enable_fused_normalization = True
            self.enable_jit_fused = True
            self.enable_flash_attention = self.enable_flash_attention or True
            # A generation step has a single token, so there is no sequence to shard.
            self.enable_sequence_parallelism = self.tensor_parallel_size > 1 and not self.inference_only

    @property
    def tensor_parallel_size(self) -> int:
        """Number of parts that each layer is computed in: ranks, or blocks (`distributed/blocks.py`)."""
        if not self.enable_tensor_parallelism or not dist.is_initialized():
            return 1
        return num_parts(self.group)

    @property
    def computes_in_blocks(self) -> bool:
        """Whether layers are computed in blocks, which do not depend on the number of ranks."""
        return blocks_of(self.group) is not None

    def replicated_spec(self, parameter: Tensor) -> ShardSpec:
        """Return the spec of a parameter that is whole on every tensor-parallel rank."""
        if self.tensor_parallel_size == 1:
            return ShardSpec(tuple(parameter.shape))
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        return ShardSpec(tuple(parameter.shape), rank=rank, world_size=size)

    @property
    def expert_parallel_size(self) -> int:
        """Number of ranks that the experts of a layer are distributed over."""
        group = self.expert_parallel_process_group
        return 1 if group is None else dist.get_world_size(group)

    @property
    def shards_experts(self) -> bool:
        """Whether several ranks share the experts."""
        return self.expert_parallel_size > 1

    @property
    def stage_manager(self) -> PipelineStageManager:
        """The stages of this rank; a single stage without pipeline parallelism."""
        return self.pipeline_stage_manager or PipelineStageManager()

    @cached_property
    def group(self) -> ProcessGroup:
        """The tensor-parallel group; the default group if none is given."""
        return self.tensor_parallel_process_group or dist.group.WORLD

    @cached_property
    def sequence(self) -> SequenceParallel | None:
        """The sequence-parallel region; None if it is disabled or there is a single tensor-parallel rank.

        An axis that computes in blocks may have one in any case: the numbers are those of sequence parallelism.
        """
        if self.tensor_parallel_size == 1:
            return None
        if (blocks := blocks_of(self.group)) is not None:
            is_divided = blocks.sequence_count > 1
            return BlockedSequence(self.group, blocks, self.enable_sequence_parallelism) if is_divided else None
        return SequenceParallel(self.group) if self.enable_sequence_parallelism else None

    @property
    def gathers_sum(self) -> bool:
        """Whether the gathers that start tensor-parallel regions sum gradients over ranks, as `f` does."""
        return self.sequence is not None and self.sequence.sums_gradients

    @property
    def cuts_sequence(self) -> bool:
        """Whether ranks have different tokens between tensor-parallel regions."""
        return self.sequence is not None and self.sequence.grad_group is not None

    @cached_property
    def context(self) -> ZigzagSharding | None:
        """The sharding of sequences over context-parallel ranks; None without context parallelism."""
        group = self.context_parallel_process_group
        return None if group is None or dist.get_world_size(group) == 1 else ZigzagSharding(group)

    def device_of(self, parameter: Tensor) -> torch.device:
        """Return the device that a model will run on, given one of its parameters."""
        if self.device is not None or parameter.is_cuda:
            return self.device or parameter.device
        group_has_gpus = not dist.is_initialized() or "nccl" in str(
            dist.get_backend_config(self.tensor_parallel_process_group)
        )
        if torch.cuda.is_available() and group_has_gpus:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def without_sequence(self) -> ShardConfig:
        """Return a copy with sequence parallelism disabled."""
        changed = copy.copy(self)
        changed.enable_sequence_parallelism = False
        changed.__dict__["sequence"] = None
        return changed

    @property
    def uses_ulysses(self) -> bool:
        """Whether ranks hold full layers and use all-to-all around attention (sequence shards to head shards)."""
        return self.sequence is not None and self.sequence_parallelism_mode == "all_to_all"

    @property
    def vocab_options(self) -> dict[str, Any]:
        """Options for both an embedding and its head, so that tied weights are sharded identically."""
        return {"divisible_by": self.make_vocab_size_divisible_by}
