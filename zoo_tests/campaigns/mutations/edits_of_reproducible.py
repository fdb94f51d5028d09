"""Edits of `plugins/hybrid_parallel/reproducible`, and the tests that must fail."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_SAME = "zoo_tests/parity/test_reproducible.py::test_a_layout_leaves_the_bits_of_one_process"

EDITS_OF_REPRODUCIBLE: dict[str, Edit] = {
    "dropout by the position in a replica's own samples": Edit(
        "plugins.hybrid_parallel.reproducible.units",
        "self.stream.begin_pass(step, sum(units[:rank]), sum(units))",
        "self.stream.begin_pass(step, 0, sum(units))",
        (f"{_SAME}[llama-bf16-dp2, zero 2, ordinary loop]",),
    ),
    "autograd adds up the uses of a tied weight": Edit(
        "plugins.hybrid_parallel.reproducible.separate_uses",
        "return None if give_gradient(ctx.parameter, grad) else grad",
        "return grad",
        (f"{_SAME}[llama-bf16-pp2]",),
    ),
    "parts of an accumulation are added after they are rounded": Edit(
        "plugins.hybrid_parallel.reproducible.bucket",
        "return self._kept is not None and",
        "return False and",
        (f"{_SAME}[llama-bf16-dp2, zero 3, accumulation 2]",),
    ),
    "a recomputed layer draws other numbers than its forward pass": Edit(
        "plugins.hybrid_parallel.reproducible.unit_stream",
        "if key in self._seeds:",
        "if not in_backward():",
        (f"{_SAME}[llama-bf16-dp2, gradient_checkpointing=full, first half as pp2]",),
    ),
    "the norm counts a tied weight on each stage": Edit(
        "plugins.hybrid_parallel.reproducible.reducer",
        "elif bucket.used and bucket.counted:",
        "elif bucket.used:",
        (f"{_SAME}[llama-bf16-dp2, gradient_checkpointing=full, first half as pp2]",),
    ),
}
