"""Uniform sharding: every linear layer is sharded independently, with full activations between layers.

A column-parallel layer gathers its outputs. A row-parallel layer slices its full input and sums the outputs. This needs
one more collective per pair of layers than Megatron-LM's pairing of column and row layers, but works for any model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.user.base import UserPolicy

_OPTIONS = {
    -1: (ColumnParallelLinear, {"gather_output": True}),
    0: (RowParallelLinear, {"splits_input": True}),
}


class UniformPolicy(UserPolicy):
    """Shards the linear layers of any model.

    Layers with tied weights, and layers with fewer features than ranks, are replicated.

    Args:
        dim: -1 shards the output features and gathers the outputs; 0 shards the input features and sums the outputs.
    """

    cuts_attention = False

    def __init__(self, dim: Literal[0, -1]) -> None:
        super().__init__()
        self._dim = dim

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table: every linear layer of the model, by its path."""
        target, options = _OPTIONS[self._dim]
        replacements = [
            SubModuleReplacementDescription(suffix=path, target_module=target, kwargs=dict(options))
            for path in self._linear_layers()
        ]
        return {"": ModulePolicyDescription(sub_module_replacement=replacements)}

    def _linear_layers(self) -> list[str]:
        held = Counter(id(param) for _, param in self.model.named_parameters(remove_duplicate=False))
        size = self.shard_config.tensor_parallel_size
        return [
            path
            for path, module in self.model.named_modules()
            if type(module) is nn.Linear or type(module).__name__ == "Conv1D"
            if held[id(module.weight)] == 1 and min(module.weight.shape) >= size
        ]
