"""Mixers: how kinds of layers are cut that plans of styles leave whole. `RULES` is the list of them."""

from __future__ import annotations

from torch import nn

from shardformer.policies.mixers.delta_net import DeltaNet
from shardformer.policies.mixers.experts import Experts
from shardformer.policies.mixers.latent_attention import LatentAttention
from shardformer.policies.mixers.mixer import MIXER as MIXER
from shardformer.policies.mixers.mixer import Mixer
from shardformer.policies.mixers.state_space import StateSpace
from shardformer.shard_config import ShardConfig

RULES: tuple[Mixer, ...] = (LatentAttention(), DeltaNet(), StateSpace(), Experts())


def rule_of(module: nn.Module) -> Mixer | None:
    """Return the rule of a module; None if it is of no kind that a rule cuts."""
    return next((rule for rule in RULES if rule.parts(module)), None)


def local_counts(owner: nn.Module, config: ShardConfig) -> dict[str, int]:
    """Return a rank's counts of heads and features of a module that a rule cuts; empty if it has all."""
    return {name: count for rule in RULES for name, count in rule.local_counts(owner, config).items()}
