"""Mutants that change one line of ZeRO stages 2 and 3, of copies of states, of offload, and of plans."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_PLANNED = "zoo_tests/hybrid_parallel/planner/test_memory.py"
_STAGES = "zoo_tests/parity/test_zero_stages.py::test_trains_like_plain_training"
_LAZY = "zoo_tests/shardformer/lazy/test_materialize.py"
_FILES = "zoo_tests/hybrid_parallel/checkpoint/test_stage_3.py::test_files_are_those_of_stage_1"
_EIGHT_BITS = "zoo_tests/shardformer/matmul/test_float8.py"
_PACKED = "zoo_tests/parity/test_quantised.py::test_replicas_keep_shards_of_packed_weights_under_stage_3"
_OFFLOAD = "zoo_tests/hybrid_parallel/offload/test_states.py"

EDITS_OF_ZERO: dict[str, Edit] = {
    "shards of earlier micro-batches forgotten": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "self._sum_of_passes.add_(self._result)",
        "self._sum_of_passes = self._result",
        (f"{_STAGES}[llama-causal_lm-dp2-zero2-adamw-clip-num_microbatches=3]",),
    ),
    "copies of a shard keep their own gradients": Edit(
        "plugins.hybrid_parallel.setup.optimizer",
        "(copies, grad_group, tied_group)",
        "(grad_group, tied_group)",
        (f"{_STAGES}[bert-masked_lm-dp4-zero1-adamw-clip-zero_size=2]",),
    ),
    "states stay in memory after their step": Edit(
        "plugins.hybrid_parallel.zero.user_optimizer",
        "state[key], moved = place.copy_(value), True",
        "place.copy_(value)",
        (f"{_OFFLOAD}::test_states_of_one_bucket_are_in_memory_at_a_time",),
    ),
    "a rank's own shard is not among the gathered ones": Edit(
        "plugins.hybrid_parallel.zero.collectives.shared_memory",
        "rows[self.rank].copy_(shard)",
        "rows[self.rank].zero_()",
        (f"{_STAGES}[llama-causal_lm-dp2-zero3-adamw-clip-num_microbatches=3]",),
    ),
    "masters of sharded parameters made of rounded values": Edit(
        "plugins.hybrid_parallel.setup.initial_weights",
        "kept = param.dtype if dtype is None or has_master else dtype",
        "kept = dtype or param.dtype",
        (f"{_LAZY}::test_16_bit_models_keep_the_full_values_for_the_optimizer[bf16-dp2-3]",),
    ),
    "a rank takes the first values of a parameter for its shard": Edit(
        "plugins.hybrid_parallel.zero.stage3",
        "values.copy_(source().reshape(-1)[start:stop])",
        "values.copy_(source().reshape(-1)[: stop - start])",
        (f"{_FILES}[llama-causal_lm-tp2dp2-zero1-adamw-tie_word_embeddings=True]",),
    ),
    "a writer leaves its own part of a tensor out": Edit(
        "plugins.hybrid_parallel.checkpoint.global_tensor",
        "local[start:stop] = values",
        "local[start:stop] = 0",
        (f"{_FILES}[llama-causal_lm-tp2dp2-zero1-adamw-tie_word_embeddings=True]",),
    ),
    "each rank rounds its tokens by its own largest value": Edit(
        "shardformer.matmul.float8",
        "dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)\n",
        "pass\n",
        (f"{_EIGHT_BITS}::test_tokens_are_rounded_before_they_are_gathered[2-llama-options0-2]",),
    ),
    "each rank rounds its part of a weight by its own largest value": Edit(
        "plugins.hybrid_parallel.features.low_bits",
        "dist.all_reduce(peaks, dist.ReduceOp.MAX, group=exchange.group)\n",
        "pass\n",
        (f"{_EIGHT_BITS}::test_weights_are_rounded_before_they_are_gathered[2-llama-options0-163840]",),
    ),
    "layers multiply by the packed values from before they were sharded": Edit(
        "plugins.hybrid_parallel.zero.stage3",
        "self.units.follow(params)\n",
        "pass\n",
        (f"{_PACKED}[quantisation1]",),
    ),
    "gradients of layers wait for those of the norms": Edit(
        "plugins.hybrid_parallel.setup.optimizer",
        "max(arrival[param] for param in item[1])",
        "min(arrival[param] for param in item[1])",
        ("zoo_tests/hybrid_parallel/zero/test_memory.py::test_few_whole_gradients_at_once_under_stage_three",),
    ),
    "a plan counts whole parameters under stage 3": Edit(
        "plugins.hybrid_parallel.planner.rank_memory",
        "(bucket.size if bucket.unit is None else shard) * itemsize",
        "bucket.size * itemsize",
        (f"{_PLANNED}::test_counted_states_with_options[llama-tp2dp2-options0]",),
    ),
    "a plan forgets activations": Edit(
        "plugins.hybrid_parallel.planner.rank_memory",
        "activations=saved,",
        "activations=0.0,",
        (f"{_PLANNED}::test_plans_keep_within_their_budgets",),
    ),
    # reductions inside a machine, then across
    "sum of another machine's shard": Edit(
        "plugins.hybrid_parallel.zero.collectives.p2p",
        "exchange.machine: sums[exchange.machine]}",
        "exchange.machine: sums[0]}",
        ("zoo_tests/hybrid_parallel/zero/collectives/test_hierarchical.py::test_two_machines_in_any_order",),
    ),
    "shards of other machines not passed on": Edit(
        "plugins.hybrid_parallel.zero.collectives.p2p",
        "exchange.machine, place, self._rows[:, exchange.place], self._rows[:, place], tag",
        "exchange.machine, place, self._rows[:1, exchange.place], self._rows[:1, place], tag",
        ("zoo_tests/hybrid_parallel/zero/collectives/test_hierarchical.py::test_two_machines_in_any_order",),
    ),
}
