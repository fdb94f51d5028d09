"""ShardConfig: how a model is to be sharded."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardformer.context_parallel.zigzag import ZigzagSharding
from shardformer.sequence_parallel.split_gather import SequenceParallel
from shardformer.stages.stage import PipelineStageManager

SequenceMode = Literal["split_gather", "all_to_all", "ring_attn"]


@dataclass
class ShardConfig:
    """What `ShardFormer` is to do.

    Attributes:
        tensor_parallel_process_group: the tensor-parallel ranks; None for the default group.
        pipeline_stage_manager: which pipeline stage this is; None for no pipeline.
        context_parallel_process_group: the ranks that share each sequence; None where each has whole ones.
        context_parallel_mode: how attention sees the tokens of those ranks, `ring_attn` or `all_to_all`.
        enable_tensor_parallelism: whether weights are cut over the group.
        enable_fused_normalization: use fused kernels for layer and RMS norms.
        enable_flash_attention: True for the fastest attention backend that fits, or the name of one.
        enable_jit_fused: fused elementwise operators.
        enable_sequence_overlap: sequence-parallel communication runs while matrices are multiplied.
        enable_sequence_parallelism: cut activations between tensor-parallel regions along the sequence.
        enable_all_optimization: switch on every optimisation that is available.
        inference_only: only forward passes will run: the model is left in evaluation mode, without gradients.
        sequence_parallelism_mode: `split_gather` between the regions of cut weights, or `all_to_all` around attention
            with whole weights.
        compute_dtype: what the model will run in, where that is not its present dtype.
        sharding_dim: None pairs column- with row-parallel layers, as the family's policy says; -1 cuts the output
            features of every linear layer and gathers, 0 the input features and adds, so that activations stay whole.
        expert_parallel_process_group: the ranks that hold other experts, and see other tokens; None where all hold all.
        expert_capacity_factor: an expert takes at most this multiple of a fair share of a sequence's tokens, see
            `shardformer.expert_parallel.experts`; None to take all.
        make_vocab_size_divisible_by: a vocabulary is padded to a multiple of this times the ranks.

    Raises:
        ValueError: an option that is not available, or options that exclude each other.
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

    def __post_init__(self) -> None:
        if self.enable_sequence_parallelism and self.sequence_parallelism_mode not in ("split_gather", "all_to_all"):
            raise ValueError(
                f"sequence_parallelism_mode='{self.sequence_parallelism_mode}' cuts nothing over the tensor-parallel "
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
            # A step of generation has one token: there is nothing to cut.
            self.enable_sequence_parallelism = self.tensor_parallel_size > 1 and not self.inference_only

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share each weight."""
        if not self.enable_tensor_parallelism or not dist.is_initialized():
            return 1
        return dist.get_world_size(self.tensor_parallel_process_group)

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share the experts of a layer."""
        group = self.expert_parallel_process_group
        return 1 if group is None else dist.get_world_size(group)

    @property
    def shards_experts(self) -> bool:
        return self.expert_parallel_size > 1

    @property
    def stage_manager(self) -> PipelineStageManager:
        return self.pipeline_stage_manager or PipelineStageManager()

    @cached_property
    def group(self) -> ProcessGroup:
        """The tensor-parallel group, the default group made explicit."""
        return self.tensor_parallel_process_group or dist.group.WORLD

    @cached_property
    def sequence(self) -> SequenceParallel | None:
        """The sequence-parallel region, or None when it is off or there is nothing to cut."""
        if not self.enable_sequence_parallelism or self.tensor_parallel_size == 1:
            return None
        return SequenceParallel(self.group)

    @cached_property
    def context(self) -> ZigzagSharding | None:
        """The ranks that share each sequence, or None where there are none."""
        group = self.context_parallel_process_group
        return None if group is None or dist.get_world_size(group) == 1 else ZigzagSharding(group)

    def without_sequence(self) -> ShardConfig:
        """The same without sequence parallelism."""
        changed = copy.copy(self)
        changed.enable_sequence_parallelism = False
        changed.__dict__.pop("sequence", None)
        return changed

    @property
    def uses_ulysses(self) -> bool:
        """Whether ranks hold whole layers and exchange the sequence for heads around attention."""
        return self.sequence is not None and self.sequence_parallelism_mode == "all_to_all"

    @property
    def vocab_options(self) -> dict[str, Any]:
        """Options that an embedding and its head share, so that tied weights are cut alike."""
        return {"divisible_by": self.make_vocab_size_divisible_by}
