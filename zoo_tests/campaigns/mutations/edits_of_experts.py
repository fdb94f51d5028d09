"""Mutants of mixtures of experts: the load of experts, biases and losses of routers."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_BALANCE = "zoo_tests/hybrid_parallel/features/test_expert_load.py"
_BIASES = f"{_BALANCE}::test_biases_are_those_of_plain_training"
_ROUTERS = "zoo_tests/shardformer/loss/test_routers.py::test_it_is_that_of_plain_training"

EDITS_OF_EXPERTS: dict[str, Edit] = {
    "padding counts for the load of experts": Edit(
        "shardformer.layers.experts",
        "weights = weights * (self._mask.reshape(-1, 1) != 0)",
        "pass",
        (f"{_BIASES}[2-Glm4Moe-options0-pipeline-5]",),
    ),
    "recomputed layers count their tokens again": Edit(
        "shardformer.layers.experts",
        "if not self._is_counting or in_backward():",
        "if not self._is_counting:",
        (f"{_BIASES}[2-Glm4Moe-options5-pipeline-5]",),
    ),
    "biases follow the load of one replica": Edit(
        "plugins.hybrid_parallel.features.expert_load",
        "if total is not None and self._mesh.size(axis) > 1:",
        "if False:",
        (f"{_BIASES}[2-Glm4Moe-options0-pipeline-5]",),
    ),
    "a skipped step moves biases": Edit(
        "plugins.hybrid_parallel.features.expert_load",
        "if self._rate > 0.0 and not was_skipped:",
        "if self._rate > 0.0:",
        (f"{_BALANCE}::test_a_skipped_step_moves_no_bias",),
    ),
    "biases grow for experts with many tokens": Edit(
        "shardformer.layers.experts",
        "bias.sub_(",
        "bias.add_(",
        (f"{_BIASES}[2-Glm4Moe-options0-pipeline-5]",),
    ),
    "padding of parts of sequences counts for the loss of routers": Edit(
        "shardformer.context_parallel.zigzag",
        "mask = mask if axis is None else axis.take(mask)",
        "mask = mask if axis is None else torch.ones_like(axis.take(mask))",
        (f"{_ROUTERS}[2-options11]",),
    ),
    "rows beyond the slots of a rank are dropped in silence": Edit(
        "shardformer.layers.experts",
        "weights, skips = weights.masked_fill(is_over, math.nan), self.may_skip",
        "skips = self.may_skip",
        ("zoo_tests/shardformer/layers/test_token_dispatcher.py::test_slots_without_rows_change_nothing[glm4_moe]",),
    ),
}
