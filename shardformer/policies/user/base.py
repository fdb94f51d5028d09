"""UserPolicy: base class of policies with a user-defined table and the family's pipeline stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property

from torch import nn

from shardformer.policies.base import Policy
from shardformer.policies.plans.stage_inference import layer_paths, stage_layout
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
