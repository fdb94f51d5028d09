"""A table of its own for a model whose family says where it may be cut into stages."""

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
    """Takes stages, and what the family prepares for them, from the family's policy; a model without one is read.

    The family is told that nothing is cut over ranks.
    """

    replicate_unlisted = True
    supports_sequence_parallel = False
    supports_ulysses = False

    @cached_property
    def family_policy(self) -> Policy | None:
        """None for a model of no known family."""
        try:
            return policy_for(self.model)
        except ValueError:
            return None

    @cached_property
    def stages(self) -> StageLayout | None:
        """Where the model may be cut: as the family says, or at its largest list of layers."""
        if self.family_policy is not None:
            return self.family_policy.stages
        return stage_layout(self.model, layer_paths(self.model, {}))

    @property
    def base_path(self) -> str:
        return "" if self.family_policy is None else self.family_policy.base_path

    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        for name in ("family_policy", "stages"):
            self.__dict__.pop(name, None)
        if self.family_policy is not None:
            self.family_policy.set_model(model)

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        super().set_shard_config(shard_config)
        if self.family_policy is not None:
            whole = copy.copy(shard_config)
            whole.enable_tensor_parallelism = False
            self.family_policy.set_shard_config(whole)

    def head_counts(self) -> Mapping[str, int]:
        """Heads that the axis has to divide: none."""
        return {}

    def check(self) -> list[str]:
        problems = super().check()
        return problems if self.family_policy is None else [*problems, *self.family_policy.check()]

    def preprocess(self) -> nn.Module:
        return self.model if self.family_policy is None else self.family_policy.preprocess()

    def postprocess(self) -> nn.Module:
        return self.model if self.family_policy is None else self.family_policy.postprocess()
