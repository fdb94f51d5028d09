"""Mixers: how kinds of layers are cut that plans of styles leave whole. `RULES` is the list of them.

State spaces are those of Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060); delta nets (arXiv 2412.06464,
2510.26692) those of Qwen3-Next, OLMo hybrid and Kimi Linear. Plans of transformers leave them whole, or gather the
outputs of their projections. They stay so where `tp_size` does not divide them, and with `reproducible=True`, whose
blocks neither a scan nor the delta rule reads; state spaces also if their weights are quantised.

Heads of Mamba-2 form groups, each of which has one input matrix B and one output matrix C. Ranks have either groups of
their own, or share the only one: each computes a part of its B and C, and all gather these before the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import copy_to_region
from shardformer.layers import ColumnParallelLinear, GatedRMSNorm, RowParallelLinear, StateSpaceProjection
from shardformer.matmul.quantised import is_quantised
from shardformer.policies import module_edits
from shardformer.policies.base import ModulePolicyDescription, PartChange, Policy, SubModuleReplacementDescription
from shardformer.policies.feature_counts import HEAD_COUNTS, HEAD_NORM, names_read
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part, ShardSpec
from shardformer.utils.module_paths import alias_buffers, alias_parameters, join, starred

MIXER = "attention_heads"  # the style of a part that a rule cuts


class Mixer:
    """The rule of one kind of layer. A further one is a file with a derived class, and an entry in `RULES`.

    Attributes:
        fills: whether the rule only fills gaps of transformers' own plans; otherwise it precedes every plan that this
            package or transformers has for a family.
    """

    fills = False

    def parts(self, module: nn.Module) -> Collection[str]:
        """Return the names of the parts of a module that the rule cuts; none if the module is of another kind."""
        return ()

    def styles(self, model: nn.Module, planned: Mapping[str, str]) -> dict[str, str]:
        """Return the styles that the rule adds to those of the family's plan, by path with `*` for numbers."""
        modules = model.named_modules()
        return {starred(join(path, name)): MIXER for path, module in modules for name in self.parts(module)}

    def change(self, policy: Policy, owner: nn.Module, name: str) -> PartChange | str | None:
        """Return how a part of such a module is sharded, or its style; None if every rank has all of it."""
        raise NotImplementedError

    def local_counts(self, owner: nn.Module, config: ShardConfig) -> dict[str, int]:
        """Return a rank's counts of heads and features; empty if it has all, or for a module of another kind."""
        return {}

    def complete(self, policy: Policy, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add to the description of a module of any kind, whose parts are described, what styles do not tell."""
        description.attribute_replacement |= self.local_counts(owner, policy.shard_config)


class FeedForward(Mixer):
    """The rule of feed-forwards, gated or not, whose linear layers a plan names."""

    def complete(self, policy: Policy, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add activations with parameters, and those that depend on all features."""
        description.sub_module_replacement += _learned_activations(owner, description)
        description.param_replacement += _feature_statistics(policy, owner, description)


def _learned_activations(
    owner: nn.Module, description: ModulePolicyDescription
) -> list[SubModuleReplacementDescription]:
    """Return activations with parameters on a rank's own features between cut layers: gradients are partial."""
    targets = {replacement.target_module for replacement in description.sub_module_replacement}
    if not {ColumnParallelLinear, RowParallelLinear} <= targets:
        return []
    names = [name for name, child in owner.named_children() if "act" in name and any(True for _ in child.parameters())]
    return [SubModuleReplacementDescription(name, None, partial_gradient=True) for name in names]


def _feature_statistics(
    policy: Policy, owner: nn.Module, description: ModulePolicyDescription
) -> list[Callable[[nn.Module], None]]:
    """Return the change of a feed-forward whose activation depends on all of its features."""
    targets = {replacement.target_module for replacement in description.sub_module_replacement}
    if policy.tp_size == 1 or ColumnParallelLinear not in targets or not hasattr(owner, "_gaussian_topk"):
        return []
    return [partial(module_edits.share_feature_statistics, group=policy.shard_config.group)]


class Experts(Mixer):
    """Adds the sum over ranks where transformers' plan has no entry for it, as that of Qwen3-Omni in 5.17."""

    fills = True

    def styles(self, model: nn.Module, planned: Mapping[str, str]) -> dict[str, str]:
        """Return the style of experts with divided output projections."""
        owners = (path.rpartition(".")[0] for path, style in planned.items() if style == "rowwise")
        return {owner: "moe_tp_experts" for owner in owners if owner.endswith(".experts")}


class Attention(Mixer):
    """The rule of attention whose projections a plan names."""

    def complete(self, policy: Policy, path: str, owner: nn.Module, description: ModulePolicyDescription) -> None:
        """Add norms of heads, and the local number of query heads of a key/value head."""
        description.attribute_replacement |= _local_groups(policy, path, owner)
        description.sub_module_replacement += _head_norms(policy, path, owner)
        description.param_replacement += _norms_by_head(policy, path, owner)


def _local_groups(policy: Policy, path: str, owner: nn.Module) -> dict[str, int]:
    """Return the local number of query heads per key/value head if key/value heads are copied; else nothing."""
    groups = getattr(owner, "num_key_value_groups", None)
    # A part of an attention may count them as well (NeoMME).
    paths = [each for each in (path, path.rpartition(".")[0]) if policy.plan.get(starred(join(each, "k_proj")))]
    if not isinstance(groups, int) or not paths or policy.plan[starred(join(paths[0], "k_proj"))] != "colwise":
        return {}
    owner = policy.model.get_submodule(paths[0])
    key = getattr(owner, "k_proj", None)
    if key is None:  # the layer reads the keys and values of an earlier one
        kv_heads = policy.model.config.get_text_config().num_attention_heads // groups
    else:
        kv_heads = policy.heads_of(owner, "k_proj", key.out_features)
    if kv_heads is None or kv_heads % policy.tp_size == 0:
        return {}
    return {"num_key_value_groups": groups * kv_heads // policy.tp_size}


def _head_norms(policy: Policy, path: str, owner: nn.Module) -> list[SubModuleReplacementDescription]:
    """Return norms of heads missing in the plan: parameters are replicated, but see only a rank's own heads."""
    head_dim = getattr(owner, "head_dim", None)
    return [
        SubModuleReplacementDescription(name, None, partial_gradient=True)
        for name, norm in _forgotten_norms(policy, path, owner)
        if all(param.numel() == head_dim for param in norm.parameters())
    ]


def _norms_by_head(policy: Policy, path: str, owner: nn.Module) -> list[Callable[[nn.Module], None]]:
    """Return changes that give each rank the norms of its heads: weights [heads, head_dim], or a list of norms."""
    head_dim, changes = getattr(owner, "head_dim", None), []
    for name, norm in _forgotten_norms(policy, path, owner):
        if all(param.dim() == 2 and param.shape[1] == head_dim for param in norm.parameters()):
            changes.append(partial(module_edits.shard_weights_of_heads, name=name, group=policy.shard_config.group))
        elif module_edits.has_norms_of_heads(norm) and policy.tp_size > 1:
            changes.append(partial(module_edits.read_norms_of_heads, name=name, group=policy.shard_config.group))
    return changes


def _forgotten_norms(policy: Policy, path: str, owner: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, norm) of head norms after column-parallel projections that the plan does not name."""
    if policy.plan.get(starred(join(path, "q_proj"))) != "colwise":
        return []
    found = [(name, norm) for name, norm in owner.named_children() if any(True for _ in norm.parameters())]
    return [
        (name, norm)
        for name, norm in found
        if HEAD_NORM.fullmatch(name) and starred(join(path, name)) not in policy.plan
    ]


# Projections to and from heads are cut; those to the compressed states, and their norms, are not.
_STYLES = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
}
_UNCUT = {"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "rotary_emb"}


class LatentAttention(Mixer):
    """The rule of latent attention. One with further parts (an indexer), or whose forward counts heads, is another."""

    fills = True

    def parts(self, module: nn.Module) -> Collection[str]:
        """Return the names of the parts that depend on heads."""
        return [name for name in _STYLES if getattr(module, name, None) is not None] if _is_plain(module) else ()

    def change(self, policy: Policy, owner: nn.Module, name: str) -> str:
        """Return the style of a part under these options."""
        config = policy.shard_config
        is_cut = owner.num_heads % config.tensor_parallel_size == 0 and not config.computes_in_blocks
        return _STYLES[name] if is_cut else "replicate"


def _is_plain(module: nn.Module) -> bool:
    children = {name for name, child in module._modules.items() if child is not None}
    if not {"kv_b_proj", "kv_a_proj_with_mqa", "o_proj"} <= children <= {*_STYLES, *_UNCUT} or module._parameters:
        return False
    return hasattr(module, "num_heads") and names_read(module).isdisjoint(HEAD_COUNTS)


_SCANNED = {"in_proj", "conv1d", "A_log", "D", "out_proj"}
_MAMBA, _MAMBA_2 = _SCANNED | {"x_proj", "dt_proj"}, _SCANNED | {"dt_bias"}
_NORMS = {"dt_layernorm", "b_layernorm", "c_layernorm"}  # of what ranks share
_COUNTS = ("intermediate_size", "conv_dim", "num_heads", "n_groups", "ssm_state_size")


class StateSpace(Mixer):
    """The rule of the mixers of Mamba and Mamba-2, as transformers writes them."""

    def parts(self, module: nn.Module) -> Collection[str]:
        """Return the names of the parts that have parameters."""
        return sorted(_parts(module)) if _is_mamba(module) or _is_mamba_2(module) else ()

    def local_counts(self, owner: nn.Module, config: ShardConfig) -> dict[str, int]:
        """Return a rank's counts of heads and features; empty if it has all, or for another module."""
        if not self.parts(owner) or not _divides_channels(owner, config):
            return {}
        counts = {"intermediate_size": owner.intermediate_size // config.tensor_parallel_size}
        if _is_mamba_2(owner):
            counts["num_heads"] = owner.num_heads // config.tensor_parallel_size
            counts["n_groups"] = max(owner.n_groups // config.tensor_parallel_size, 1)
            counts["conv_dim"] = counts["intermediate_size"] + 2 * counts["n_groups"] * owner.ssm_state_size
        return counts

    def change(self, policy: Policy, owner: nn.Module, name: str) -> PartChange | None:
        """Return how a part is sharded; None if every rank has all of it."""
        config = policy.shard_config
        if not _divides_channels(owner, config):
            return None
        shares = _is_mamba_2(owner) and owner.n_groups < config.tensor_parallel_size
        if name == "in_proj":
            target = StateSpaceProjection if shares else ColumnParallelLinear
            return SubModuleReplacementDescription(name, target, {"parts": _projected(owner, shares)})
        if name in ("x_proj", "out_proj"):
            return SubModuleReplacementDescription(name, RowParallelLinear, {})
        # Up to transformers 5.22 the norms of Mamba-2, Bamba and Granite 4 go over all groups.
        if name == "norm" and (shares or not any(hasattr(owner.norm, count) for count in ("group_size", "n_groups"))):
            return SubModuleReplacementDescription(name, GatedRMSNorm, {})
        if name in _NORMS:
            return SubModuleReplacementDescription(name, None, partial_gradient=True)
        if name == "conv1d":
            return partial(_cut_convolution, parts=_projected(owner, shares), shares=shares, group=config.group)
        if name in ("norm", "dt_proj"):
            return partial(_cut_norm if name == "norm" else _cut_time_steps, group=config.group)
        dims = getattr(owner, name).dim()
        return partial(module_edits.shard_own_parameter, name=name, from_end=dims, num_parts=1, group=config.group)


def _is_mamba(module: nn.Module) -> bool:
    names = _parts(module)
    if not _MAMBA <= names <= _MAMBA | _NORMS or not hasattr(module, "intermediate_size"):
        return False
    size = module.intermediate_size
    return (module.in_proj.out_features, module.conv1d.in_channels, module.D.numel()) == (2 * size, size, size)


def _is_mamba_2(module: nn.Module) -> bool:
    if not _MAMBA_2 <= _parts(module) <= _MAMBA_2 | {"norm"} or not all(hasattr(module, name) for name in _COUNTS):
        return False
    size, channels = module.intermediate_size, module.intermediate_size + 2 * module.n_groups * module.ssm_state_size
    found = (module.in_proj.out_features, module.conv1d.in_channels, module.conv_dim)
    return found == (size + channels + module.num_heads, channels, channels)


def _parts(module: nn.Module) -> set[str]:
    """Return the names of the parameters of a module, and of its modules that have some."""
    children = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    return children | {name for name, parameter in module._parameters.items() if parameter is not None}


def _divides_channels(owner: nn.Module, config: ShardConfig) -> bool:
    size = config.tensor_parallel_size
    if size == 1 or config.computes_in_blocks or any(map(is_quantised, owner.parameters())):
        return False
    if _is_mamba(owner):
        return owner.intermediate_size % size == 0
    has_groups = owner.n_groups % size == 0 or (owner.n_groups == 1 and 2 * owner.ssm_state_size % size == 0)
    return owner.num_heads % size == 0 and has_groups


def _projected(owner: nn.Module, shares: bool) -> tuple[Part, ...]:
    """Return the parts of the output of `in_proj`: gate, what the convolution reads, and time steps of Mamba-2."""
    size = owner.intermediate_size
    if _is_mamba(owner):
        return (Part(size), Part(size))
    states = owner.n_groups * owner.ssm_state_size
    matrices = (Part(2 * states),) if shares else (Part(states), Part(states))
    return (Part(size), Part(size), *matrices, Part(owner.num_heads))


def _cut_convolution(owner: nn.Module, *, parts: tuple[Part, ...], shares: bool, group: ProcessGroup) -> None:
    """Shard the convolution, and change how the mixer around it runs.

    Args:
        parts: those of the output of `in_proj`. The channels are all but the gate, the last of Mamba and the first of
            Mamba-2, and the time steps of Mamba-2, the last.
        shares: whether all ranks convolve B and C.
    """
    channels = parts[1:-1] or parts[:1]
    if shares:
        _share_matrices(owner, *channels, group)
    else:
        module_edits.shard_channels(owner, name="conv1d", parts=channels, group=group)
    _take_local_factors(owner, parts, shares, group)
    _run_part_by_part(owner)


def _share_matrices(owner: nn.Module, inner: Part, matrices: Part, group: ProcessGroup) -> None:
    """Let each rank convolve its heads' channels, and all of B and C; the kernels, [channels, 1, width], stay whole."""
    conv = owner.conv1d
    start, stop, _ = inner.piece(dist.get_rank(group), dist.get_world_size(group))

    def local(*_: Any) -> dict[str, Tensor]:
        whole = {name: each for name, each in conv._parameters.items() if each is not None}
        return {name: torch.cat([each[start:stop], each[inner.size :]]) for name, each in whole.items()}

    for name, _ in list(conv.named_parameters()):
        module_edits.sum_gradient_of_parameter(conv, name=name, group=group)
    alias_parameters(conv, local, during=owner)
    conv.groups = conv.in_channels = conv.out_channels = stop - start + matrices.size


def _take_local_factors(owner: nn.Module, parts: tuple[Part, ...], shares: bool, group: ProcessGroup) -> None:
    """Let a mixer read a rank's part of the factors of its projection, buffers [..., features] of Falcon-H1."""
    features = sum(part.size for part in parts)
    spec = ShardSpec((features,), 0, parts, dist.get_rank(group), dist.get_world_size(group))
    columns = [slice(start, stop) for start, stop, _ in spec.pieces()]
    if shares:
        columns[2] = slice(parts[0].size + parts[1].size, -parts[3].size)

    def local(*_: Any) -> dict[str, Tensor]:
        whole = {name: each for name, each in owner.named_buffers(recurse=False) if each.shape[-1:] == (features,)}
        return {name: torch.cat([each[..., part] for part in columns], dim=-1) for name, each in whole.items()}

    alias_buffers(owner, local)


def _run_part_by_part(owner: nn.Module) -> None:
    """Keep a mixer from the kernels for training that read the weights of all its parts.

    These add nothing up over ranks. transformers takes them in training mode only, which nothing else in a mixer reads.
    """
    modes: list[bool] = []

    def enter(module: nn.Module, _: Any) -> None:
        modes.append(module.training)
        module.training = False

    def leave(module: nn.Module, *_: Any) -> None:
        module.training = modes.pop()

    owner.register_forward_pre_hook(enter)
    owner.register_forward_hook(leave, always_call=True)


def _cut_norm(owner: nn.Module, *, group: ProcessGroup) -> None:
    """Shard the gated norm, each of whose groups is on one rank."""
    module_edits.shard_own_parameter(owner.norm, name="weight", from_end=1, num_parts=1, group=group)
    if hasattr(owner.norm, "n_groups"):
        owner.norm.n_groups //= dist.get_world_size(group)


def _cut_time_steps(owner: nn.Module, *, group: ProcessGroup) -> None:
    """Shard what makes the time steps of all channels from the low-rank ones that `x_proj` returns, as B and C."""
    for name, parameter in list(owner.dt_proj.named_parameters()):
        module_edits.shard_own_parameter(owner.dt_proj, name=name, from_end=parameter.dim(), num_parts=1, group=group)

    def share(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return copy_to_region(output, group)  # read for a rank's own channels: gradients are partial

    share.sees_adapters = True
    owner.x_proj.register_forward_hook(share)


_COLUMN, _PARTS, _ROW, _CHANNELS, _HEADS, _NORM, _WHOLE = "column", "parts", "row", "channels", "heads", "norm", "whole"


@dataclass(frozen=True)
class Form:
    """A kind of delta net."""

    roles: Mapping[str, str]  # each of its modules and parameters -> what it is
    heads: tuple[str, ...]  # attributes that count heads
    features: tuple[str, ...]  # attributes that count features of heads
    channels: tuple[str, ...] = ()  # those of them that are the channels of the convolution, one behind the other
    gathers: bool = False  # whether projections are divided, and their outputs gathered, where heads are not divided


_GATED = {
    "heads": ("num_k_heads", "num_v_heads"),
    "features": ("key_dim", "value_dim", "conv_dim"),
    "channels": ("key_dim", "key_dim", "value_dim"),
}
_DELTA = {"conv1d": _CHANNELS, "A_log": _HEADS, "dt_bias": _HEADS}
_QWEN = {**_DELTA, "norm": _NORM, "out_proj": _ROW}
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
    Form({**_DELTA, "o_norm": _NORM, "o_proj": _ROW, **{f"{part}_proj": _COLUMN for part in "qkvabg"}}, **_GATED),
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
        if form is None or not _divides_heads(owner, form, config):
            return {}
        return {name: getattr(owner, name) // size for name in form.heads + form.features}

    def change(self, policy: Policy, owner: nn.Module, name: str) -> PartChange | None:
        """Return how a part is sharded; None if every rank has all of it."""
        return change_of(owner, name, policy.shard_config)


def change_of(owner: nn.Module, name: str, config: ShardConfig) -> PartChange | None:
    """Return how a part of a delta net is sharded; None if every rank has all of it."""
    form, part = form_of(owner), getattr(owner, name)
    role = form.roles[name]
    if not _divides_heads(owner, form, config):
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
        return partial(module_edits.shard_channels, name=name, parts=_channels(owner, form), group=config.group)
    if role == _HEADS:  # the only dim that is not 1
        from_end = part.dim() - max(range(part.dim()), key=part.shape.__getitem__)
        return partial(module_edits.shard_own_parameter, name=name, from_end=from_end, num_parts=1, group=config.group)
    return SubModuleReplacementDescription(name, None, partial_gradient=True) if role == _NORM else None


def _divides_heads(owner: nn.Module, form: Form, config: ShardConfig) -> bool:
    size = config.tensor_parallel_size
    is_meant = size > 1 and not config.computes_in_blocks
    return is_meant and all(getattr(owner, name) % size == 0 for name in form.heads)


def _channels(owner: nn.Module, form: Form) -> tuple[Part, ...]:
    return tuple(Part(getattr(owner, name)) for name in form.channels)


RULES: tuple[Mixer, ...] = (Attention(), FeedForward(), LatentAttention(), DeltaNet(), StateSpace(), Experts())


def rule_of(module: nn.Module) -> Mixer | None:
    """Return the rule of a module; None if it is of no kind that a rule cuts."""
    return next((rule for rule in RULES if rule.parts(module)), None)
