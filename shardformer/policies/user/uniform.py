"""Every linear layer cut by itself: activations are whole between layers, whatever the layers are.

A column-parallel layer gathers its outputs, a row-parallel one reads its features of a whole input and sums. That takes
one collective more a pair of layers than the pairing of Megatron-LM, and works for any model.
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
    """Cuts the linear layers of any model.

    Weights that are tied to others, and layers with fewer features than ranks, stay whole.

    Args:
        dim: -1 cuts the output features, whose pieces are gathered; 0 the input features, whose partial sums are added.
    """

    cuts_attention = False

    def __init__(self, dim: Literal[0, -1]) -> None:
        super().__init__()
        self._dim = dim

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
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
