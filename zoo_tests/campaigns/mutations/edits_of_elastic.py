"""Edits of snapshots in memory and of elastic jobs, and the tests that must fail."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_SNAPSHOT = "zoo_tests/hybrid_parallel/elastic/test_snapshot.py"
_LAYOUTS = "zoo_tests/hybrid_parallel/elastic/test_layouts.py"

EDITS_OF_ELASTIC: dict[str, Edit] = {
    "copies of pieces stay on their machine": Edit(
        "plugins.hybrid_parallel.elastic.layouts",
        "there = rows[(index + 1) % len(rows)]",
        "there = rows[index]",
        (f"{_SNAPSHOT}::test_the_bits_of_a_save_and_a_load_after_the_loss_of_a_machine[fp32]",),
    ),
    "replicas keep their number of samples": Edit(
        "plugins.hybrid_parallel.checkpoint.training_state",
        'size, replicas = saved["global_batch_size"],',
        "size, replicas = loader.global_batch_size,",
        (f"{_SNAPSHOT}::test_the_bits_of_a_save_and_a_load_after_the_loss_of_a_machine[fp32]",),
    ),
    "replicas that cannot share a global batch": Edit(
        "plugins.hybrid_parallel.elastic.layouts",
        "or (self._global_batch or 0) % (world_size // block)",
        "or (self._global_batch or 0) % 1",
        (f"{_LAYOUTS}::test_the_planned_layout_else_a_part_of_the_given_one[3-8-known2-None]",),
    ),
}
