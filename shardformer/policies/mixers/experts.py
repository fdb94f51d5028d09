"""Experts whose output projections are cut between inputs, and return partial sums."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardformer.policies.mixers.mixer import Mixer


class Experts(Mixer):
    """Adds the sum over ranks where transformers' plan has no entry for it, as that of Qwen3-Omni in 5.17."""

    fills = True

    def styles(self, model: nn.Module, planned: Mapping[str, str]) -> dict[str, str]:
        """Return the style of experts with divided output projections."""
        owners = (path.rpartition(".")[0] for path, style in planned.items() if style == "rowwise")
        return {owner: "moe_tp_experts" for owner in owners if owner.endswith(".experts")}
