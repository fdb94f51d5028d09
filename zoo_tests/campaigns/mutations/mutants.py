"""Faults that released systems really had, put into the library on purpose: the tests have to notice each of them.

A mutant is a function that patches the library inside a rank that has just started. Nothing but a rank of the pool
applies one; see `zoo_tests.campaigns.mutations` for the script that runs the tests against each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.shard_spec import spec_of
from zoo_tests.campaigns.mutations.edits import Edit
from zoo_tests.campaigns.mutations.edits_of_activations import EDITS_OF_ACTIVATIONS
from zoo_tests.campaigns.mutations.edits_of_elastic import EDITS_OF_ELASTIC
from zoo_tests.campaigns.mutations.edits_of_experts import EDITS_OF_EXPERTS
from zoo_tests.campaigns.mutations.edits_of_integrations import EDITS_OF_INTEGRATIONS
from zoo_tests.campaigns.mutations.edits_of_models import EDITS_OF_MODELS
from zoo_tests.campaigns.mutations.edits_of_plans import EDITS_OF_PLANS
from zoo_tests.campaigns.mutations.edits_of_plugin import EDITS_OF_PLUGIN
from zoo_tests.campaigns.mutations.edits_of_relayout import EDITS_OF_RELAYOUT
from zoo_tests.campaigns.mutations.edits_of_reproducible import EDITS_OF_REPRODUCIBLE
from zoo_tests.campaigns.mutations.edits_of_shardformer import EDITS_OF_SHARDFORMER, PARITY
from zoo_tests.campaigns.mutations.edits_of_trainers import EDITS_OF_TRAINERS
from zoo_tests.campaigns.mutations.edits_of_zero import EDITS_OF_ZERO

_TWO = "num_microbatches=2"
_FLASH = "enable_flash_attention=True"
_RECOMPUTED = "gradient_checkpointing=full"
_KERNELS = f"{_FLASH}-enable_fused_normalization=True-enable_jit_fused=True"
FEATURES = "zoo_tests/parity/test_features.py::test_options_together"
PRECISION = "zoo_tests/parity/test_precision.py::test_16_bit"
DROPOUT = "zoo_tests/parity/test_dropout.py"
NONFINITE = "zoo_tests/hybrid_parallel/features/test_nonfinite.py"
SYNCHRONY = "zoo_tests/hybrid_parallel/features/test_consistency.py"
SCHEDULES = "zoo_tests/parity/test_schedules.py::test_trains_like_plain_training"
LOOPS = "zoo_tests/parity/test_loops.py"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        apply: puts it into the library.
        tests: the tests that have to notice; each of them, not just one.
    """

    apply: Callable[[], None]
    tests: tuple[str, ...]


def apply(name: str) -> None:
    """Put the fault of that name into this process's library."""
    MUTANTS[name].apply()


def _no_data_parallel_reduction() -> None:
    from plugins.hybrid_parallel.zero.collectives.backend import ReduceScatterHandle, ZeroCollectives
    from plugins.hybrid_parallel.zero.collectives.shared_memory import SharedMemoryCollectives

    def keep_own(self: ZeroCollectives, flat: Tensor, shard: Tensor) -> ReduceScatterHandle:
        shard.copy_(flat.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)])
        return ReduceScatterHandle(shard)

    SharedMemoryCollectives.reduce_scatter = keep_own


def _mean_of_means() -> None:
    from plugins.hybrid_parallel.loss.step_loss import HeadStepLoss

    def share(self: HeadStepLoss, outputs: Any, index: int) -> Tensor:
        microbatch = self.microbatches[index]
        means = len(self.microbatches) * self.mesh.size("dp")
        return self.head_loss.weighted_sum(outputs, microbatch, self.head_loss.counts(microbatch) * means)

    HeadStepLoss._share = share


def _no_tied_weight_sync() -> None:
    _patch_buckets(lambda bucket, tied: _forget_sums(bucket, lambda param: param in tied))


def _no_optimizer_step() -> None:
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer

    HybridParallelOptimizer.step = lambda self, closure=None: None


def _own_dropout_mask_on_every_rank() -> None:
    from plugins.hybrid_parallel.setup import model as build

    make_stream = build._stream
    build._stream = lambda mesh, seed: make_stream(mesh, seed + mesh.rank("tp"))


def _same_dropout_mask_in_all_heads() -> None:
    from shardformer.distributed import random as rng

    seed_generators = rng.seed_default_generators
    rng.seed_default_generators = lambda seed: seed_generators(min(seed, 2**40))


def _no_sum_over_copied_kv_heads() -> None:
    _patch_buckets(lambda bucket, tied: _forget_sums(bucket, lambda param: spec_of(param).copies > 1))


def _partial_gradients_of_sequence_regions() -> None:
    _patch_buckets(
        lambda bucket, tied: _forget_sums(bucket, lambda param: spec_of(param).dim is None and param not in tied)
    )


def _clipping_counts_every_copy() -> None:
    def count(bucket: Any, _: Any) -> None:
        bucket.counted = True

    _patch_buckets(count)


def _clipping_counts_one_stage() -> None:
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
    from plugins.hybrid_parallel.zero.reducer import norm_of_rank

    def norm(self: HybridParallelOptimizer, norm_type: float = 2.0) -> Tensor:
        return norm_of_rank(self.buckets, self.mesh.device, norm_type)

    HybridParallelOptimizer.global_norm = norm


def _no_unscaling() -> None:
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer

    HybridParallelOptimizer._gradient_factor = lambda self: None


def _no_gathering_after_the_step() -> None:
    from plugins.hybrid_parallel.zero import bucket

    bucket.Bucket.all_gather_params = lambda self, overlaps=False: None


def _bad_copies_do_not_count() -> None:
    from plugins.hybrid_parallel.zero import reducer

    norm_of_rank = reducer.norm_of_rank
    reducer.norm_of_rank = lambda buckets, *options: norm_of_rank([one for one in buckets if one.counted], *options)


def _copies_are_not_compared() -> None:
    from plugins.hybrid_parallel.features import diagnostics as synchrony

    differences = synchrony._differences
    synchrony._differences = lambda scope: iter(()) if scope.words == "tensor-parallel" else differences(scope)


def _batches_by_names_alone() -> None:
    from plugins.hybrid_parallel.data import checks as batches

    batches.checksum = lambda tensor: 0


def _labels_not_shifted() -> None:
    from shardformer.loss import heads, text

    def unshifted(model: nn.Module) -> heads.HeadLoss:
        loss = text.masked_lm(model)
        loss.function = text.causal_lm(model).function  # by another's name the model's own forward would take over
        return loss

    heads.USUAL_HEAD_LOSSES["ForCausalLM"] = unshifted


def _experts_read_alone() -> None:
    from shardformer.policies import module_edits as plan_styles
    from shardformer.policies.plans import styles as plan_changes

    plan_changes.STYLES["moe_tp_experts"] = plan_changes._hooked(plan_styles.reduce_output)


def _encoder_learns_nothing() -> None:
    from shardformer.stages.placeholders import CachedTower

    forward = CachedTower.forward

    def detached(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.detach()
        return output

    CachedTower.forward = detached


def _encoder_read_as_a_slice() -> None:
    from shardformer.policies.rules import ShardingRules

    column = ShardingRules.column

    def gathered(self: ShardingRules, *suffixes: str, reads_whole: bool = False, **options: Any) -> list[Any]:
        return column(self, *suffixes, **options)

    ShardingRules.column = gathered


def _gradient_of_experts_summed_twice() -> None:
    """A block that runs whole is entered by a gather that sums gradients, although each rank has all of them."""
    from shardformer.distributed.sequence_parallel import SequenceParallel, first_input, first_output
    from shardformer.policies.plans import sequence as plan_sequence

    def summed(module: nn.Module, region: SequenceParallel) -> None:
        module.register_forward_pre_hook(lambda _, a, k: first_input(a, k, region.gather), with_kwargs=True)
        module.register_forward_hook(lambda _, __, output: first_output(output, region.enter))

    plan_sequence.run_whole = summed


def _forget_sums(bucket: Any, chosen: Callable[[nn.Parameter], bool]) -> None:
    """Leave the gradients of the chosen parameters unsummed over the ranks that hold parts of them."""
    if any(chosen(param) for param in bucket.params):
        bucket.sum_groups.clear()


def _patch_buckets(change: Callable[[Any, Any], None]) -> None:
    """Change every bucket after it was made; `change` gets the bucket and the tied parameters."""
    from plugins.hybrid_parallel.setup import optimizer as build

    build_buckets = build.build_buckets

    def changed(groups: Any, *, tied: Any, **others: Any) -> list[Any]:
        buckets = build_buckets(groups, tied=tied, **others)
        for bucket in buckets:
            change(bucket, tied)
        return buckets

    build.build_buckets = changed


def _weights_that_wait_are_forgotten() -> None:
    from plugins.hybrid_parallel.pipeline import runtime

    runtime.run_deferred = lambda deferred: deferred.clear()


MUTANTS: dict[str, Mutant | Edit] = {
    **EDITS_OF_SHARDFORMER,
    **EDITS_OF_PLUGIN,
    **EDITS_OF_ZERO,
    **EDITS_OF_RELAYOUT,
    **EDITS_OF_ELASTIC,
    **EDITS_OF_REPRODUCIBLE,
    **EDITS_OF_ACTIVATIONS,
    **EDITS_OF_TRAINERS,
    **EDITS_OF_MODELS,
    **EDITS_OF_EXPERTS,
    **EDITS_OF_PLANS,
    **EDITS_OF_INTEGRATIONS,
    "no data-parallel reduction": Mutant(
        _no_data_parallel_reduction,
        (f"{PARITY}[bert-masked_lm-dp2-zero1]", f"{PARITY}[llama-causal_lm-pp2dp2-zero1]"),
    ),
    "mean of means": Mutant(
        _mean_of_means, (f"{PARITY}[bert-masked_lm-dp2-zero1]", f"{PARITY}[gpt2-lm_head-pp2-zero1]")
    ),
    "no tied-weight sync": Mutant(
        _no_tied_weight_sync, (f"{PARITY}[gpt2-lm_head-pp2-zero1]", f"{PARITY}[bert-masked_lm-tp2pp2-zero1]")
    ),
    "no optimizer step": Mutant(
        _no_optimizer_step,
        (f"{PARITY}[bert-masked_lm-single-zero1]", f"{PRECISION}[bert-masked_lm-pp2dp2-zero1-momentum-bf16]"),
    ),
    "own dropout mask on every rank": Mutant(
        _own_dropout_mask_on_every_rank,
        (f"{DROPOUT}::test_replicated_activations_are_dropped_alike_on_all_ranks[bert-False]",),
    ),
    "same dropout mask in all heads": Mutant(
        _same_dropout_mask_in_all_heads, (f"{DROPOUT}::test_heads_are_dropped_differently_on_every_rank",)
    ),
    "no sum over copied kv heads": Mutant(_no_sum_over_copied_kv_heads, (f"{PARITY}[llama-causal_lm-tp4-zero1]",)),
    "partial gradients in sequence regions": Mutant(
        _partial_gradients_of_sequence_regions,
        (
            f"{PARITY}[bert-masked_lm-tp2-zero1-sp]",
            f"{PARITY}[gpt2-lm_head-tp2pp2-zero1-sp]",
            f"{PARITY}[gpt_neox-causal_lm-tp2pp2-zero1-sp-{_TWO}-{_KERNELS}]",
        ),
    ),
    "encoder read as a slice": Mutant(
        _encoder_read_as_a_slice, (f"{PARITY}[bart-generation-tp2pp2-zero1-sp-{_TWO}-{_KERNELS}]",)
    ),
    "gradient of experts summed twice": Mutant(
        _gradient_of_experts_summed_twice, (f"{PARITY}[mixtral-causal_lm-tp2pp2-zero1-sp-fp32-{_TWO}-{_RECOMPUTED}]",)
    ),
    "clipping counts every copy": Mutant(
        _clipping_counts_every_copy, (f"{FEATURES}[gpt2-lm_head-tp2pp2-zero1-sp-adamw-clip]",)
    ),
    "clipping counts one stage": Mutant(
        _clipping_counts_one_stage, (f"{FEATURES}[bert-masked_lm-pp2dp2-zero0-momentum-clip]",)
    ),
    "no unscaling": Mutant(_no_unscaling, (f"{PRECISION}[bert-masked_lm-tp2pp2-zero1-momentum-fp16]",)),
    "no gathering after the step": Mutant(_no_gathering_after_the_step, (f"{PARITY}[llama-causal_lm-dp2-zero1]",)),
    "experts read alone": Mutant(
        _experts_read_alone, (f"{PARITY}[mixtral-causal_lm-tp2pp2-zero1-sp-fp32-{_TWO}-{_RECOMPUTED}]",)
    ),
    "encoder learns nothing": Mutant(
        _encoder_learns_nothing, (f"{PARITY}[t5-generation-tp2pp2-zero1-sp-fp32-{_TWO}-{_KERNELS}]",)
    ),
    "bad copies do not count": Mutant(
        _bad_copies_do_not_count, (f"{NONFINITE}::test_a_bad_gradient_on_one_rank_is_named_on_all[tp2-1]",)
    ),
    "copies are not compared": Mutant(
        _copies_are_not_compared,
        (
            f"{SYNCHRONY}::test_the_first_difference_is_named[tp2-copied_weight]",
            f"{SYNCHRONY}::test_debug_mode_compares_before_a_pass_spreads_it[tp2]",
        ),
    ),
    "batches by names alone": Mutant(
        _batches_by_names_alone, (f"{SYNCHRONY}::test_another_batch_on_one_rank_of_a_replica[pp2]",)
    ),
    "weights that wait are forgotten": Mutant(
        _weights_that_wait_are_forgotten,
        (f"{SCHEDULES}[llama-causal_lm-pp2-zero1-pp_style=zero_bubble-num_microbatches=4]",),
    ),
    "labels not shifted": Mutant(_labels_not_shifted, (f"{PARITY}[llama-causal_lm-tp2-zero1]",)),
}
