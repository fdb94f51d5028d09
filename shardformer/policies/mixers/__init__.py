"""Mixers: how kinds of layers are cut that plans of styles leave whole. `RULES` is the list of them."""

from __future__ import annotations

from torch import nn

from shardformer.policies.mixers.mixer import MIXER as MIXER
from shardformer.policies.mixers.mixer import Attention, Experts, FeedForward, LatentAttention, Mixer
from shardformer.policies.mixers.mixer import HeadCounts as HeadCounts
from shardformer.policies.mixers.state_space import DeltaNet, StateSpace

RULES: tuple[Mixer, ...] = (Attention(), FeedForward(), LatentAttention(), DeltaNet(), StateSpace(), Experts())


def rule_of(module: nn.Module) -> Mixer | None:
    """Return the rule of a module; None if it is of no kind that a rule cuts."""
    return next((rule for rule in RULES if rule.parts(module)), None)
