"""Edits of `plugins/hybrid_parallel/reproducible`, and the tests that must fail."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_SAME = "zoo_tests/parity/test_reproducible.py::test_a_layout_leaves_the_bits_of_one_process"

EDITS_OF_REPRODUCIBLE: dict[str, Edit] = {
    "dropout by the position in a replica's own samples": Edit(
        "plugins.hybrid_parallel.reproducible.feature",
        "self.stream.begin_pass(step, sum(units[:rank]), sum(units))",
        "self.stream.begin_pass(step, 0, sum(units))",
        (f"{_SAME}[llama-bf16-dp2, zero 2, ordinary loop]",),
    ),
    "autograd adds up the uses of a tied weight": Edit(
        "plugins.hybrid_parallel.reproducible.feature",
        "return None if give_gradient(ctx.parameter, grad) else grad",
        "return grad",
        (f"{_SAME}[llama-bf16-pp2]",),
    ),
    "parts of an accumulation are added after they are rounded": Edit(
        "plugins.hybrid_parallel.reproducible.reducer",
        "return self._kept is not None and",
        "return False and",
        (f"{_SAME}[llama-bf16-dp2, zero 3, accumulation 2]",),
    ),
    "a recomputed layer draws other numbers than its forward pass": Edit(
        "plugins.hybrid_parallel.reproducible.feature",
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
    "a rank adds up its blocks one after the other": Edit(
        "shardformer.distributed.blocks",
        "[first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]",
        "[parts[0] + parts[1], *parts[2:]]",
        (f"{_SAME}[bert-fp32-tp2, zero 3, ordinary loop]",),
    ),
    "blocks draw by their position on the rank": Edit(
        "shardformer.distributed.blocks",
        "(block + 1) % 2**62",
        "(index + 1) % 2**62",
        (f"{_SAME}[llama-bf16-tp4]",),
    ),
    "blocks of a sequence add up the gradients of a norm in floating point": Edit(
        "shardformer.distributed.sequence_parallel",
        "BlockedTensor([blocks.use(each) for _ in blocks.local], blocks)",
        "BlockedTensor([blocks.use(each)] * len(blocks.local), blocks)",
        (f"{_SAME}[bert-fp32-cp2]",),
    ),
    "blocks that copy a key/value head add up their gradients in floating point": Edit(
        "shardformer.matmul.native",
        "parameters = [region.use(weight) for _ in range(num_uses)]",
        "parameters = [weight for _ in range(num_uses)]",
        (f"{_SAME}[llama-bf16-tp4]",),
    ),
}
