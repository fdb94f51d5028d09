"""Mutants that change one line of ZeRO stages 2 and 3, of states that some replicas repeat, and of offload."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_STAGES = "zoo_tests/parity/test_zero_stages.py::test_trains_like_plain_training"
_OFFLOAD = "zoo_tests/hybrid_parallel/offload/test_states.py"

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
    "states stay in memory after their step": Edit(
        "plugins.hybrid_parallel.zero.stepper",
        "state[key], moved = place.copy_(value), True",
        "place.copy_(value)",
        (f"{_OFFLOAD}::test_states_of_one_bucket_are_in_memory_at_a_time",),
    ),
    "a rank's own shard is not among the gathered ones": Edit(
        "plugins.hybrid_parallel.zero.comm.shard_gather",
        "rows[self.exchange.rank].copy_(self.shard)",
        "rows[self.exchange.rank].zero_()",
        (f"{_STAGES}[llama-causal_lm-dp2-zero3-adamw-clip-num_microbatches=3]",),
    ),
}
