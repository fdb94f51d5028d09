"""What context parallelism asks of a model, and what it changes in one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from shardformer.attention import uses_registry
from shardformer.context import Positions, cut_inputs, gather_behind
from shardformer.losses import head_loss_of
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.stage import StandIn

# Rotary tables that depend on the length of the sequence, which no rank has whole.
_ROTARY_OF_LENGTH = ("dynamic", "longrope")


def context_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """What keeps a model from sharing its sequences over ranks."""
    asked, name = f"cp_size={config.context.size}", type(model).__name__
    reason = next(_reasons(model, policy), None)
    problems = [] if reason is None else [f"{asked} cannot share the sequences of {name}, {reason}; use cp_size=1"]
    heads = getattr(model.config, "num_attention_heads", config.context.size) // config.tensor_parallel_size
    if not problems and config.context_parallel_mode == "all_to_all" and heads % config.context.size:
        problems.append(
            f"sequence_parallelism_mode='all_to_all' shares {heads} heads out, which {asked} does not divide; "
            "use 'ring_attn'"
        )
    return problems


def _reasons(model: nn.Module, policy: Policy) -> Iterator[str]:
    layout, text = policy.stages, getattr(model, "config", None)
    base = model.get_submodule(policy.base_path) if policy.base_path else getattr(model, "base_model", model)
    if layout is None or layout.then is not None or getattr(text, "is_encoder_decoder", False):
        yield "which has other layers than one list of them"
    if not policy.exchanges_heads or not any(map(uses_registry, model.modules())):
        yield "whose attention does not go through transformers' registry alone"
    if not policy.mixes_in_attention_alone():
        yield "whose tokens meet outside of attention"
    if "position_ids" not in inspect.signature(base.forward).parameters:
        yield "which takes no position_ids"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        yield "whose attention scores are soft-capped"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if kinds & set(_ROTARY_OF_LENGTH):
        yield "whose rotary embedding depends on the length of a sequence"


def share_sequences(model: nn.Module, policy: Policy, config: ShardConfig, positions: Positions) -> None:
    """Cut the inputs of the base model, and gather the sequence behind its layers where its head reads whole ones."""
    axis = config.context
    base = model.get_submodule(policy.base_path) if policy.base_path else getattr(model, "base_model", model)
    cut_inputs(base, axis, positions)
    head = head_loss_of(model)
    model.context_axis, model.sequence_is_cut = axis, True
    model.returns_parts = head is not None and head.per_token
    last = model.get_submodule(".".join(filter(None, (policy.base_path, policy.stages.layers))))[-1]
    if not model.returns_parts and not isinstance(last, StandIn):
        gather_behind(last, axis)
