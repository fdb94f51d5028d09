"""UserPolicy: base class of policies with a user-defined table and the family's pipeline stages.

Uniform sharding: every linear layer is sharded independently, with full activations between layers.

A column-parallel layer gathers its outputs. A row-parallel layer slices its full input and sums the outputs. This needs
one more collective per pair of layers than Megatron-LM's pairing of column and row layers, but works for any model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.policies.base import ModulePolicyDescription, Origin, Policy, SubModuleReplacementDescription
from shardformer.policies.plans.stages import layer_paths, stage_layout
from shardformer.policies.registry import policy_for
from shardformer.shard_config import ShardConfig
from shardformer.stages.stage import StageLayout


class UserPolicy(Policy):
    """Base class of policies that define their own table and take the rest from the family's policy.

    The rest is the stage layout and the preparation of the model. For a model without a family policy the layout is
    inferred from the module tree. The family's policy gets a config with tensor parallelism disabled.
    """

    replicate_unlisted = True
    supports_sequence_parallel = False
    supports_ulysses = False

    @cached_property
    def family_policy(self) -> Policy | None:
        """The policy of the model's family; None if the family is unknown."""
        try:
            return policy_for(self.model)
        except ValueError:
            return None

    @cached_property
    def stages(self) -> StageLayout | None:
        """The stage layout of the family, or one at the model's largest list of layers."""
        if self.family_policy is not None:
            return self.family_policy.stages
        if type(self.model).__module__.startswith("diffusers."):
            return None  # blocks read embeddings of the time and of a text, and return two hidden states
        return stage_layout(self.model, layer_paths(self.model, {}))

    @property
    def base_path(self) -> str:
        """Path of the base model according to the family's policy."""
        return "" if self.family_policy is None else self.family_policy.base_path

    def set_model(self, model: nn.Module) -> None:
        """Set the model, also of the family's policy, which is looked up again."""
        super().set_model(model)
        for name in ("family_policy", "stages"):
            self.__dict__.pop(name, None)
        if self.family_policy is not None:
            self.family_policy.set_model(model)

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the sharding options, for the family's policy without tensor parallelism."""
        super().set_shard_config(shard_config)
        if self.family_policy is not None:
            whole = copy.copy(shard_config)
            whole.enable_tensor_parallelism = False
            self.family_policy.set_shard_config(whole)

    def head_counts(self) -> Mapping[str, int]:
        """Return no head counts: the tensor-parallel size need not divide any."""
        return {}

    def check(self) -> list[str]:
        """Return why the model cannot be sharded, according to both policies."""
        problems = super().check()
        return problems if self.family_policy is None else [*problems, *self.family_policy.check()]

    def preprocess(self) -> nn.Module:
        """Prepare the model as the family's policy does."""
        return self.model if self.family_policy is None else self.family_policy.preprocess()

    def postprocess(self) -> nn.Module:
        """Finish the model as the family's policy does."""
        return self.model if self.family_policy is None else self.family_policy.postprocess()


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

    origin = Origin.UNIFORM

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
