"""Adapters of the peft package on a sharded model.

Adapters are detached while the model is sharded, so that a policy sees the layers of its family; then each is sharded
like the layer that it wraps. Adapters are recognized by peft's own classes. This package imports peft only in functions
that need a model of peft: code with such a model has imported peft already. docs/adapters.md lists what is supported.
"""

from __future__ import annotations

from shardformer.peft.kinds import (
    adapter_configs,
    behind_prompts,
    check_adapters,
    kind_of,
    model_inside,
    prompt_config,
    prompts_followed,
    prompts_on_stages,
    virtual_tokens,
)
from shardformer.peft.shard import adapters_detached, keep_whole

__all__ = [
    "adapter_configs",
    "adapters_detached",
    "behind_prompts",
    "check_adapters",
    "prompts_followed",
    "keep_whole",
    "kind_of",
    "model_inside",
    "prompt_config",
    "prompts_on_stages",
    "virtual_tokens",
]
