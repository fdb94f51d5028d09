"""Completion: extra styles for modules that a family's plan leaves replicated.

They are derived from tiny models, and applied only where the real model has the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from torch import nn

from shardformer.layers.linear import out_features
from shardformer.matmul.native import is_linear
from shardformer.policies.feature_counts import HEAD_NORM
from shardformer.policies.mixers import HeadCounts
from shardformer.policies.plans.plan import Plan, derived_line, ends_in, families_in, family_of, lookup
from shardformer.policies.plans.styles import fused_parts
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.module_paths import join, starred

COLUMNS, ROWS = {"colwise", "fused_colwise", "packed_colwise"}, {"rowwise", "packed_rowwise"}
# Tables of tokens that are not the vocabulary of the head, and experts in front of a norm.
_PER_LAYER = {"embed_tokens_per_layer": "embedding_rowwise"}
_DECLARED = {
    "blt": {"encoder_hash_tok_embedding": "embedding_rowwise"},
    "csm": {"embed_text_tokens": "embedding_rowwise"},
    "diffusion_gemma": _PER_LAYER,
    "gemma3n": _PER_LAYER,
    "gemma4": _PER_LAYER,
    "muse_spark": {
        "mlp.experts.gate_up_proj": "packed_colwise",
        "mlp.experts.down_proj": "rowwise",
        "mlp.experts": "moe_tp_normed_experts",
    },
}
_COPIED = ("k_proj", "v_proj")  # whose heads may be fewer than ranks


@dataclass(frozen=True)
class Completion:
    """Styles of parts of a family that its plan does not name.

    Attributes:
        declared: parts that are cut in every model of the family; paths match by their end.
        derived: parts that are cut where their modules are of `classes`, and `tp_size` divides their heads.
        classes: path of a module with parts in `derived` -> names of the classes from which they were derived.
    """

    declared: Mapping[str, str] = field(default_factory=dict)
    derived: Plan = Plan({})
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def fitting(self, model: nn.Module, policy: HeadCounts) -> Plan:
        """Return the parts that fit a model; columns and rows of one product stay whole together."""
        styles = self.derived.styles_of(model)
        owners: dict[str, list[nn.Module]] = {}
        for path, module in model.named_modules():
            if isinstance(module, StagePlaceholder):
                continue
            owners.setdefault(starred(path), []).append(module)
        unfit = {
            region_of(path, styles)
            for path in styles
            for owner in owners.get(path.rpartition(".")[0], ())
            if not self._fits(path, styles, owner, policy)
        }
        fitting = {path: style for path, style in styles.items() if region_of(path, styles) not in unfit}
        kept = {path.rpartition(".")[0] for path in fitting}
        local = {end: names for end, names in self.derived.local.items() if any(ends_in(path, end) for path in kept)}
        return Plan(fitting | Plan(self.declared).styles_of(model), local)

    def _fits(self, path: str, styles: Mapping[str, str], owner: nn.Module, policy: HeadCounts) -> bool:
        at, _, name = path.rpartition(".")
        if type(owner).__name__ not in (lookup(at, self.classes) or ()):
            return False
        own = {join(at, each) for each, parameter in owner._parameters.items() if parameter is not None}
        if path in own and not own <= styles.keys() and not any(True for _ in owner.children()):
            return False  # a convolution with a bias, whose kernels alone were seen
        if norms_all_heads(owner):
            return False
        counts = self.derived.local_values(at, owner, 1).values()
        is_even = not any(count % policy.tp_size for count in counts)
        # Keys whose channels are convolved behind their projection are divided, and cannot be copied.
        is_convolved = any(each.startswith(f"{at}.") and styles[each] == "first_dim" for each in styles)
        return is_even and _has_whole_heads(owner, name, styles[path], policy, () if is_convolved else _COPIED)


@cache
def completion(family: str | None) -> Completion | None:
    """Return what the plan of a family leaves whole; None if nothing.

    `python -m zoo_tests.campaigns.proposed_plans --complete PATTERN` derives `completed.json` from tiny models.
    """
    declared, found = _DECLARED.get(family, {}), derived_line("completed.json", family)
    if not declared and found is None:
        return None
    found = found or {"styles": {}, "local": {}, "classes": {}}
    local = {path: tuple(names) for path, names in found["local"].items()}
    return Completion(declared, Plan(found["styles"], local), found["classes"])


def completions() -> dict[str, Completion]:
    """Return all completions, by family."""
    return {family: completion(family) for family in sorted({*families_in("completed.json"), *_DECLARED})}


def completion_of(cls: type) -> Completion | None:
    """Return what the plan of a transformers model class, or of its bases, leaves whole."""
    families = sorted({family_of(each) for each in cls.__mro__} - {None})
    return next((found for family in families if (found := completion(family)) is not None), None)


def region_of(path: str, styles: Mapping[str, str]) -> str:
    """Return the path of the smallest module around a part that has columns and rows behind them, or of the part.

    What is no column or row itself, such as a norm of heads, belongs to a module of its layer, not to the layer.
    """
    at, owner = path, path.rpartition(".")[0]
    while at:
        inside = {style for each, style in styles.items() if each.startswith(f"{at}.")}
        if inside & COLUMNS and inside & ROWS:
            return at
        at = at.rpartition(".")[0]
        if at.endswith("*") and at != owner and styles[path] not in COLUMNS | ROWS:
            break
    return path


def norms_all_heads(owner: nn.Module) -> bool:
    """Return whether an attention has norms over the features of all heads, as InternVL's with `use_qk_norm`."""
    norms = [part for name, part in owner.named_children() if HEAD_NORM.fullmatch(name)]
    sizes = {parameter.numel() for norm in norms for parameter in norm.parameters() if parameter.dim() == 1}
    return isinstance(getattr(owner, "head_dim", None), int) and bool(sizes - {owner.head_dim})


def _has_whole_heads(owner: nn.Module, name: str, style: str, policy: HeadCounts, may_be_copied: Sequence[str]) -> bool:
    """Return whether each rank gets whole heads of a projection; true for what is not one to attention heads."""
    module = getattr(owner, name, None)
    if style not in COLUMNS or not isinstance(module, nn.Module) or not is_linear(module):
        return True
    if style == "fused_colwise":
        parts = fused_parts(policy, owner, name)
        return all(part.unit == 1 or part.size // part.unit % policy.tp_size == 0 for part in parts)
    features = out_features(module) // (2 if style == "packed_colwise" else 1)
    heads, head_dim = policy.heads_of(owner, name, features), getattr(owner, "head_dim", None)
    if heads is None:
        return True
    if isinstance(head_dim, int) and features % head_dim == 0:
        heads = features // head_dim
    is_copied = style == "colwise" and name in may_be_copied and policy.tp_size % heads == 0
    return heads % policy.tp_size == 0 or is_copied
