"""Mutants that change one line of ZeRO stages 2 and 3, of states that some replicas repeat, and of their plans."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_PLANNED = "zoo_tests/hybrid_parallel/planner/test_memory.py"
_STAGES = "zoo_tests/parity/test_zero_stages.py::test_trains_like_plain_training"

EDITS_OF_ZERO: dict[str, Edit] = {
    "shards of earlier micro-batches forgotten": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "self._sum_of_passes.add_(self._result)",
        "self._sum_of_passes = self._result",
        (f"{_STAGES}[llama-causal_lm-dp2-zero2-adamw-clip-num_microbatches=3]",),
    ),
    "copies of a shard keep their own gradients": Edit(
        "plugins.hybrid_parallel.zero.grouping",
        "(copies, grad_group, tied_group)",
        "(grad_group, tied_group)",
        (f"{_STAGES}[bert-masked_lm-dp4-zero1-adamw-clip-zero_size=2]",),
    ),
    "a rank's own shard is not among the gathered ones": Edit(
        "plugins.hybrid_parallel.zero.comm.shard_gather",
        "rows[self.exchange.rank].copy_(self.shard)",
        "rows[self.exchange.rank].zero_()",
        (f"{_STAGES}[llama-causal_lm-dp2-zero3-adamw-clip-num_microbatches=3]",),
    ),
    "gradients of layers wait for those of the norms": Edit(
        "plugins.hybrid_parallel.zero.grouping",
        "return 2 if is_tied else int(not is_sharded)",
        "return 2 if is_tied else 0",
        ("zoo_tests/hybrid_parallel/zero/test_memory.py::test_few_whole_gradients_at_once_under_stage_three",),
    ),
    "a plan counts whole parameters under stage 3": Edit(
        "plugins.hybrid_parallel.planner.memory_model",
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
}
