"""Heads of delta nets (arXiv 2412.06464, 2510.26692; Qwen3-Next, OLMo hybrid, Kimi Linear), which `tp_size` divides.

Plans of transformers gather the outputs of their projections, or leave them whole, so that every rank computes all
heads. The same fallback is used here where `tp_size` does not divide the heads, and with `reproducible=True`, whose
blocks the delta rule does not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.policies.base import PartChange, SubModuleReplacementDescription
from shardformer.policies.mixers.mixer import HeadCounts, Mixer
from shardformer.policies.module_edits import shard_channels, shard_own_parameter
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part

_COLUMN, _PARTS, _ROW, _CHANNELS, _HEADS, _NORM, _WHOLE = "column", "parts", "row", "channels", "heads", "norm", "whole"


@dataclass(frozen=True)
class Form:
    """A kind of delta net.

    Attributes:
        roles: each of its modules and parameters -> what it is.
        heads: attributes that count heads.
        features: attributes that count features of heads.
        channels: those of them that are the channels of the convolution, one behind the other.
        gathers: whether projections are divided, and their outputs gathered, where heads are not divided.
    """

    roles: Mapping[str, str]
    heads: tuple[str, ...]
    features: tuple[str, ...]
    channels: tuple[str, ...] = ()
    gathers: bool = False


_GATED = {
    "heads": ("num_k_heads", "num_v_heads"),
    "features": ("key_dim", "value_dim", "conv_dim"),
    "channels": ("key_dim", "key_dim", "value_dim"),
}
_STATES = {"conv1d": _CHANNELS, "A_log": _HEADS, "dt_bias": _HEADS}
_QWEN = {**_STATES, "norm": _NORM, "out_proj": _ROW}
_KIMI = {
    **{"conv1d": _CHANNELS, "forget_gate": _WHOLE, "o_norm": _NORM, "o_proj": _ROW},
    **{f"{part}_proj": _COLUMN for part in "qkvb"},
}
_OF_KIMI = {"heads": ("num_heads",), "features": ("qkv_dim", "conv_dim"), "channels": ("qkv_dim",) * 3}
_GATE = {"A_log": _HEADS, "dt_bias": _HEADS}
_FORMS = (
    # The query, key, values and gates of a key head lie next to each other,
    Form({**_QWEN, **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), _COLUMN)}, **_GATED, gathers=True),
    # or those of all heads.
    Form(
        {**_QWEN, "in_proj_qkv": _PARTS, **dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a"), _COLUMN)},
        **_GATED,
        gathers=True,
    ),
    Form({**_STATES, "o_norm": _NORM, "o_proj": _ROW, **{f"{part}_proj": _COLUMN for part in "qkvabg"}}, **_GATED),
    # Kimi delta attention and its gate; of Bailing, without projections of low rank.
    Form({**_KIMI, "g_a_proj": _WHOLE, "g_b_proj": _COLUMN}, **_OF_KIMI),
    Form({**_KIMI, "g_proj": _COLUMN}, **_OF_KIMI),
    Form({**_GATE, "f_a_proj": _WHOLE, "f_b_proj": _COLUMN}, ("num_heads",), ("qkv_dim",)),
    Form({**_GATE, "f_proj": _COLUMN}, ("num_heads",), ("qkv_dim",)),
)


def form_of(module: nn.Module) -> Form | None:
    """Return the kind of a delta net; None for another module."""
    children = {name for name, child in module._modules.items() if child is not None}
    parts = children | {name for name, parameter in module._parameters.items() if parameter is not None}
    fitting = (form for form in _FORMS if parts == form.roles.keys())
    return next((form for form in fitting if all(hasattr(module, name) for name in form.heads + form.features)), None)


class DeltaNet(Mixer):
    """The rule of delta nets."""

    def parts(self, module: nn.Module) -> Collection[str]:
        """Return the names of its modules and parameters."""
        form = form_of(module)
        return () if form is None else form.roles

    def local_counts(self, owner: nn.Module, config: ShardConfig) -> dict[str, int]:
        """Return a rank's counts of heads and features; empty if it has all, or for another module."""
        form, size = form_of(owner), config.tensor_parallel_size
        if form is None or not _divides(owner, form, config):
            return {}
        return {name: getattr(owner, name) // size for name in form.heads + form.features}

    def change(self, policy: HeadCounts, owner: nn.Module, name: str) -> PartChange | None:
        """Return how a part is sharded; None if every rank has all of it."""
        return change_of(owner, name, policy.shard_config)


def change_of(owner: nn.Module, name: str, config: ShardConfig) -> PartChange | None:
    """Return how a part of a delta net is sharded; None if every rank has all of it."""
    form, part = form_of(owner), getattr(owner, name)
    role = form.roles[name]
    if not _divides(owner, form, config):
        is_gathered = form.gathers and role in (_COLUMN, _PARTS, _ROW)
        options = {"gather_output": True}
        return SubModuleReplacementDescription(name, ColumnParallelLinear, options, reads=name) if is_gathered else None
    if role == _ROW:
        return SubModuleReplacementDescription(name, RowParallelLinear, {})
    if role in (_COLUMN, _PARTS):
        options = {"parts": _channels(owner, form)} if role == _PARTS else {}
        return SubModuleReplacementDescription(
            name, ColumnParallelLinear, options, reads=f"input of {part.in_features} features"
        )
    if role == _CHANNELS:
        return partial(shard_channels, name=name, parts=_channels(owner, form), group=config.group)
    if role == _HEADS:  # the only dim that is not 1
        from_end = part.dim() - max(range(part.dim()), key=part.shape.__getitem__)
        return partial(shard_own_parameter, name=name, from_end=from_end, num_parts=1, group=config.group)
    return SubModuleReplacementDescription(name, None, partial_gradient=True) if role == _NORM else None


def _divides(owner: nn.Module, form: Form, config: ShardConfig) -> bool:
    size = config.tensor_parallel_size
    is_meant = size > 1 and not config.computes_in_blocks
    return is_meant and all(getattr(owner, name) % size == 0 for name in form.heads)


def _channels(owner: nn.Module, form: Form) -> tuple[Part, ...]:
    return tuple(Part(getattr(owner, name)) for name in form.channels)
