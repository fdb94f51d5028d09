"""Adapters of the peft package on a sharded model.

Adapters are set aside while the model is sharded, so that a policy sees the layers of its family; then each is cut like
the layer that it wraps. What an adapter is, the classes of peft say; peft is never imported here, because whoever has
an adapter has imported it. What works where is in docs/adapters.md.
"""

from __future__ import annotations

from shardformer.peft.checks import check_adapters
from shardformer.peft.detach import adapters_aside
from shardformer.peft.kinds import adapter_configs, kind_of, model_inside
from shardformer.peft.prompts import behind_prompts
from shardformer.peft.shard import keep_whole

__all__ = [
    "adapter_configs",
    "adapters_aside",
    "behind_prompts",
    "check_adapters",
    "keep_whole",
    "kind_of",
    "model_inside",
]
