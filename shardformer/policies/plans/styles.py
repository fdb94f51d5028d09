"""Lowering of the tensor-parallel styles of a plan to changes that the engine makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import nn

from shardformer import layers
from shardformer.distributed.blocks import rank_of_draws
from shardformer.distributed.random import draw_per_rank
from shardformer.layers.linear import in_features, out_features
from shardformer.policies import module_edits
from shardformer.policies.base import (
    ModulePolicyDescription,
    PartChange,
    PlanEntry,
    Policy,
    SubModuleReplacementDescription,
)
from shardformer.policies.mixers import MIXER, rule_of
from shardformer.shard_spec import Part
from shardformer.utils.module_paths import join, path_of, starred

Style = Callable[..., PartChange | None]  # of a policy, the owner of a part, its name, and the options of an entry


def lowered(
    policy: Policy, parts: Iterable[tuple[str, nn.Module, str]], entries: Mapping[str, PlanEntry]
) -> dict[str, ModulePolicyDescription]:
    """Return the table of changes that the styles of parts stand for, by paths of their owners.

    Args:
        parts: (path of the owner, owner, name of its module or parameter).
        entries: style of each part, by its path, or by one with `*` for numbers.
    """
    table: dict[str, ModulePolicyDescription] = {}
    for path, owner, name in parts:
        description, at = table.setdefault(path, ModulePolicyDescription()), join(path, name)
        entry = entries[at] if at in entries else entries[starred(at)]
        change = STYLES[entry.style](policy, owner, name, **entry.options)
        if isinstance(change, SubModuleReplacementDescription):
            description.sub_module_replacement.append(change)
        elif change is not None:
            description.param_replacement.append(change)
    return table


def _column(
    policy: Policy,
    owner: nn.Module,
    name: str,
    gather: bool = False,
    stride: int = 1,
    num_heads: int | None = None,
) -> PartChange:
    """Shard output features, `stride` fused projections independently of each other."""
    module = getattr(owner, name)
    if not isinstance(module, nn.Module):
        # Some plans of transformers do not account for gate and up being two parts.
        num_parts = 2 if name == "gate_up_proj" else 1
        return partial(
            module_edits.shard_own_parameter,
            name=name,
            from_end=2,
            num_parts=num_parts,
            group=policy.shard_config.group,
        )
    options = {"part_size": out_features(module) // stride} if stride > 1 else {}
    if gather:
        options |= {"gather_output": True, "num_heads": num_heads}
        return SubModuleReplacementDescription(name, layers.ColumnParallelLinear, options, reads=name)
    options["num_heads"] = num_heads or policy.heads_of(owner, name, out_features(module))
    reads = f"input of {in_features(module)} features"
    return SubModuleReplacementDescription(name, layers.ColumnParallelLinear, options, reads=reads)


def _gathered(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    """Let a linear layer that mixes sharded features, [..., features], such as heads, see all of them on each rank."""
    return lambda module: module_edits.run_on_gathered_features(getattr(module, name), policy.shard_config.group)


def fused_parts(policy: Policy, owner: nn.Module, name: str) -> tuple[Part, ...]:
    """Return the parts of a fused projection of query, key and value; keys and values may have fewer heads."""
    features = out_features(getattr(owner, name))
    head_dim, kv_heads = getattr(owner, "head_dim", None), getattr(owner, "num_key_value_heads", None)
    if isinstance(head_dim, int) and isinstance(kv_heads, int) and 3 * kv_heads * head_dim < features:
        keys = Part(kv_heads * head_dim, head_dim)
        return (Part(features - 2 * keys.size, head_dim), keys, keys)
    heads = policy.heads_of(owner, name, features // 3)
    return (Part(features // 3, 1 if heads is None else features // 3 // heads),) * 3


def _fused_column(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    """Shard a fused projection of query, key and value, in this order."""
    return SubModuleReplacementDescription(
        name, layers.ColumnParallelLinear, {"parts": fused_parts(policy, owner, name)}
    )


def _first_dim(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    """Shard a parameter along its first dim, such as one entry per head."""
    dims = getattr(owner, name).dim()
    return partial(
        module_edits.shard_own_parameter, name=name, from_end=dims, num_parts=1, group=policy.shard_config.group
    )


def _row(
    policy: Policy, owner: nn.Module, name: str, splits_input: bool = False, num_heads: int | None = None
) -> PartChange:
    module = getattr(owner, name)
    if not isinstance(module, nn.Module):
        return partial(
            module_edits.shard_own_parameter, name=name, from_end=1, num_parts=1, group=policy.shard_config.group
        )
    heads = num_heads if num_heads or splits_input else policy.heads_of(owner, name, in_features(module))
    options = {"num_heads": heads, "splits_input": splits_input}
    return SubModuleReplacementDescription(name, layers.RowParallelLinear, options)


def _row_of_values(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    """Shard the last dim of a parameter, features of key/value heads."""
    return partial(_row(policy, owner, name), num_heads=policy.model.config.get_text_config().num_key_value_heads)


def _packed(policy: Policy, owner: nn.Module, name: str, from_end: int) -> PartChange:
    module = getattr(owner, name)
    if not isinstance(module, nn.Module):
        group = policy.shard_config.group
        return partial(module_edits.shard_own_parameter, name=name, from_end=from_end, num_parts=2, group=group)
    return SubModuleReplacementDescription(name, layers.ColumnParallelLinear, {"part_size": out_features(module) // 2})


def _embedding(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    return SubModuleReplacementDescription(name, layers.VocabParallelEmbedding, policy.shard_config.vocab_options)


def _head(policy: Policy, owner: nn.Module, name: str, gather: bool = False) -> PartChange:
    """Shard a language-model head over the vocabulary."""
    options = policy.shard_config.vocab_options | ({"gather_output": True} if gather else {})
    return SubModuleReplacementDescription(
        name, layers.GatheredLMHead if gather else layers.VocabParallelLMHead, options
    )


def _partial_gradient(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    if not isinstance(getattr(owner, name), nn.Module):
        return partial(module_edits.sum_gradient_of_parameter, name=name, group=policy.shard_config.group)
    return SubModuleReplacementDescription(name, None, partial_gradient=True)


def _bias_of_partial_sums(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    return partial(module_edits.divide_bias_of_partial_sums, name=name, group=policy.shard_config.group)


def _dropout(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    return SubModuleReplacementDescription(name, layers.ParallelDropout if policy.tp_size > 1 else None, {})


def _hooked(hook: Callable[..., None]) -> Style:
    """Make a style that applies `hook` to a module, to change its inputs or outputs."""

    def style(policy: Policy, owner: nn.Module, name: str) -> PartChange:
        return lambda module: hook(getattr(module, name), policy.shard_config.group)

    return style


def _draws_per_rank(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    """Let an attention with built-in dropout draw separate random numbers on each rank, for its own heads."""
    return lambda module: setattr(
        module, name, draw_per_rank(getattr(module, name), rank_of_draws(policy.shard_config.group))
    )


def _activation_dropout(policy: Policy, owner: nn.Module, name: str) -> PartChange | None:
    """Give each rank its own mask in a layer with an `activation_dropout` between its linear layers."""
    if not hasattr(getattr(owner, name), "activation_dropout"):
        return None

    def change(module: nn.Module) -> None:
        layer = getattr(module, name)
        if hasattr(layer, "activation_fn"):  # a layer of this stage, not a placeholder
            module_edits.drop_behind_activation(layer, rank_of_draws(policy.shard_config.group))

    return change


def _local_biases(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    """Let an attention that gets the biases of all heads use those of its own, and draw its own random numbers."""
    heads, group = policy.model.config.num_attention_heads, policy.shard_config.group

    def change(module: nn.Module) -> None:
        module_edits.use_local_biases(getattr(module, name), heads, group)
        setattr(module, name, draw_per_rank(getattr(module, name), rank_of_draws(group)))

    return change


def _latent_key_value(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    config = getattr(owner, "config", None) or policy.model.config.get_text_config()
    size = getattr(owner, "qk_rope_head_dim", None) or config.qk_rope_head_dim
    return lambda module: module_edits.sum_gradient_of_rotary_part(
        getattr(module, name), size, policy.shard_config.group
    )


def _cast_by_use(policy: Policy, owner: nn.Module, name: str) -> PartChange:
    return lambda module: module_edits.cast_by_use(module, name)


def _by_rule(policy: Policy, owner: nn.Module, name: str) -> PartChange | None:
    """Cut a part as the rule of the mixer that has it says.

    Layers of a hybrid may have each at a path, or another attention, for which the plan of transformers has a style.
    """
    rule = rule_of(owner)
    if rule is None:
        path = starred(join(path_of(policy.model, owner), name))
        found = (getattr(policy.model, "tp_plan", None) or {}).get(path, "replicate")
    else:
        found = rule.change(policy, owner, name)
    return STYLES[found](policy, owner, name) if isinstance(found, str) else found


def _nothing(policy: Policy, owner: nn.Module, name: str) -> None:
    return None


STYLES: dict[str, Style] = {
    "colwise": _column,
    "colwise_gather_output": partial(_column, gather=True),
    "colwise_rep": partial(_column, gather=True),
    "first_dim": _first_dim,
    "gathered": _gathered,
    "fused_colwise": _fused_column,
    "rowwise": _row,
    "rowwise_of_values": _row_of_values,
    "rowwise_split_input": partial(_row, splits_input=True),
    "rowwise_rep": partial(_row, splits_input=True),
    "packed_colwise": partial(_packed, from_end=2),
    "packed_rowwise": partial(_packed, from_end=1),
    "partial_bias": _bias_of_partial_sums,
    "embedding_rowwise": _embedding,
    "embedding_colwise": _embedding,  # the sharded dim makes no difference to callers
    "lm_head": _head,
    "gathered_lm_head": partial(_head, gather=True),
    "dropout": _dropout,
    "replicated_with_grad_allreduce": _partial_gradient,
    "mla_kv_a_proj": _latent_key_value,
    "moe_tp_experts": _hooked(module_edits.share_expert_inputs),
    "moe_tp_normed_experts": _hooked(module_edits.share_input_of_normed_experts),
    "moe_identity_expert": _hooked(module_edits.scale_input),
    "all_reduce": _hooked(module_edits.reduce_shared_experts),
    "activation_dropout": _activation_dropout,
    "draws_per_rank": _draws_per_rank,
    "local_biases": _local_biases,
    "local_params": _nothing,
    "cast_by_use": _cast_by_use,
    MIXER: _by_rule,
    "replicate": _nothing,
    "sequence_parallel": _nothing,  # norms between regions: full sequences give the same result
}
