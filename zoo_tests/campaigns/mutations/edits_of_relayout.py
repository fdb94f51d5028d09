"""Edits of `plugins/hybrid_parallel/relayout.py`, and the tests that must fail."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_TESTS = "zoo_tests/hybrid_parallel/relayout/test_relayout.py"

EDITS_OF_RELAYOUT: dict[str, Edit] = {
    "parts of chunks read from their start": Edit(
        "plugins.hybrid_parallel.checkpoint.dcp_storage",
        "chunk = chunk.narrow(dim, start, size)",
        "chunk = chunk.narrow(dim, 0, size)",
        (f"{_TESTS}::test_the_bits_of_a_save_and_a_load[llama]",),
    ),
    "parts of chunks read into the start of a rectangle": Edit(
        "plugins.hybrid_parallel.checkpoint.dcp_storage",
        "tensor = tensor.narrow(dim, offset, length)",
        "tensor = tensor.narrow(dim, 0, length)",
        ("zoo_tests/hybrid_parallel/checkpoint/test_global_tensor.py::test_what_one_cut_has_written_another_reads",),
    ),
    "a refused layout keeps the user's optimizer": Edit(
        "plugins.hybrid_parallel.relayout",
        'group["params"] = params',
        "pass",
        (f"{_TESTS}::test_what_is_refused_leaves_the_job_as_it_was[layout-more than the model's]",),
    ),
    "gradients are lost without a word": Edit(
        "plugins.hybrid_parallel.zero.optimizer",
        "if self._accumulates:",
        "if False:",
        (f"{_TESTS}::test_what_is_refused_leaves_the_job_as_it_was[gradients-are no part of a training state]",),
    ),
}
