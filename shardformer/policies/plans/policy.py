"""PlanPolicy: a policy built from a model's tensor-parallel plan, or of attention alone.

A plan maps paths with `*` for numbers ("layers.*.self_attn.q_proj") to styles. Each style is lowered to a change that
the engine makes; an unknown style is rejected by name. The stage layout is inferred from the module tree: the plan
names the layer list, and modules are assumed to run in the order in which they are registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from shardformer.attention import log_once
from shardformer.attention.packed_documents import token_mixers
from shardformer.attention.registry import PARAMETER
from shardformer.layers.experts import expert_modules
from shardformer.policies.base import ModulePolicyDescription, Origin, PlanEntry, Policy
from shardformer.policies.feature_counts import HEAD_COUNTS, attends, functions_of_all_features, is_attention
from shardformer.policies.mixers import RULES
from shardformer.policies.plans import sequence
from shardformer.policies.plans.plan import (
    COLUMNS,
    ROWS,
    Plan,
    completion_of,
    divides_sequences,
    family_of,
    norms_all_heads,
    proposed_plan,
)
from shardformer.policies.plans.stages import layer_paths, stage_layout
from shardformer.policies.plans.styles import STYLES, lowered
from shardformer.shard_spec import divided_share
from shardformer.utils.derived_modules import stored_weight
from shardformer.utils.module_paths import divisors_phrase, join, path_of, starred, text_config
from shardformer.utils.source import GETTERS


def attention_alone_mixes(layers: Iterable[nn.Module]) -> bool:
    """Return whether attention alone mixes tokens in these layers, judged by their modules; False if there are none."""
    layers = list(layers)
    is_everywhere = all(any(map(attends, layer.modules())) for layer in layers)
    return bool(layers) and is_everywhere and not _other_mixers(layers, known=[])


def attention_and_mixers_mix(layers: Iterable[nn.Module]) -> bool:
    """Return whether attention and `token_mixers` alone mix tokens in the layers of a hybrid model."""
    layers = list(layers)
    mixers = token_mixers(layers)
    attentions = [module for layer in layers for module in layer.modules() if attends(module)]
    return bool(mixers and attentions) and not _other_mixers(layers, mixers)


def _other_mixers(layers: Sequence[nn.Module], known: Sequence[nn.Module]) -> list[nn.Module]:
    """Return what may mix tokens outside of attention and of the `known` modules."""
    inside = {each for module in known for each in module.modules()}
    modules = [each for layer in layers for each in layer.modules() if each not in inside]
    attentions = [each for each in modules if attends(each)]
    # A nested module inside attention may select tokens by itself (an indexer).
    parts = [child for module in attentions for child in module.children()]
    selecting = [part for part in parts if any(True for child in part.children() for _ in child.parameters())]
    owners = [module for module in attentions if not module._parameters.keys() <= {PARAMETER}]
    return [*(each for each in modules if isinstance(each, nn.Conv1d)), *selecting, *owners]


def attention_outside(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the attentions of a model that are outside of these layers."""
    held = {module for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if attends(module) and module not in held]


def towers_share_configs(model: nn.Module, layers: Iterable[nn.Module]) -> bool:
    """Return whether attention outside of the layers has their configuration, which names the kernel."""
    layers = list(layers)
    named = {id(module.config) for layer in layers for module in layer.modules() if hasattr(module, "config")}
    return any(id(getattr(module, "config", None)) in named for module in attention_outside(model, layers))


_NORM_OF_A_HEAD = "replicated_with_grad_allreduce"
# The style of a part of an attention -> that where each rank has the features of all heads between its projections.
_OF_ALL_HEADS = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input", _NORM_OF_A_HEAD: "replicate"}


class PlanPolicy(Policy):
    """Policy for a model with a `tp_plan`, or of a family with a declared plan.

    Modules that the plan does not name are replicated.

    Args:
        declared: the plan declared in this package for the family; it takes precedence over the model's own plan.
    """

    names_norms = False
    replicate_unlisted = True
    supports_sequence_parallel = True
    splits_towers = True
    checks_counts = False  # whether tp_size must divide all attributes that the plan names

    def __init__(self, declared: Plan | None = None) -> None:
        super().__init__()
        self.declared = declared
        self.needs = {} if declared is None else declared.needs
        self.origin = Origin.TRANSFORMERS if declared is None else declared.origin
        self.head_losses = {} if declared is None else declared.head_losses

    def __reduce__(self) -> tuple[type[PlanPolicy], tuple[Plan | None]]:
        """Pickle the plan alone: a model and its process groups cannot be sent to other processes."""
        return type(self), (self.declared,)

    @property
    def base_path(self) -> str:
        """Return ""."""
        return ""  # the paths of a plan start at the model itself

    @cached_property
    def _entries(self) -> Mapping[str, PlanEntry]:
        """The style of each path of the model, and who says so; later layers precede earlier ones."""
        found = {path: PlanEntry(style, self.origin) for path, style in self._own_styles.items()}
        if self._is_shipped:
            fills_gaps = self.declared is None or self.declared.styles is None
            for rule in RULES if fills_gaps else [rule for rule in RULES if not rule.fills]:
                styles = rule.styles(self.model, self._own_styles)
                own = {path: PlanEntry(style, Origin.MIXER) for path, style in styles.items()}
                found = own | found if rule.fills else found | own
        # What was derived is known to be right: the plan of transformers 5.17 cuts fused projections of towers in two.
        completed = self.completion.styles_of(self.model)
        found |= {path: PlanEntry(style, Origin.COMPLETED) for path, style in completed.items()}
        gathered = self._of_all_heads({path: entry.style for path, entry in found.items()})
        return found | {path: PlanEntry(style, Origin.MIXER) for path, style in gathered.items()}

    @property
    def _is_shipped(self) -> bool:
        """Whether the plan is one of this package or of transformers; others are used as they are written."""
        return self.origin is not Origin.USER

    def entries(self) -> Mapping[str, PlanEntry]:
        """Return what the plan says about each path of the model, with `*` for numbers."""
        return self._entries

    @cached_property
    def plan(self) -> Mapping[str, str]:
        """The tensor-parallel style of each path of the model."""
        return {path: entry.style for path, entry in self._entries.items()}

    def _of_all_heads(self, styles: Mapping[str, str]) -> Mapping[str, str]:
        """Return the styles of attentions whose norms the plan takes for those of a head, and are over all (Molmo2)."""
        found: dict[str, str] = {}
        for path, owner in self.model.named_modules():
            own = {
                each: styles[each]
                for name, _ in owner.named_children()
                if (each := starred(join(path, name))) in styles
            }
            if _NORM_OF_A_HEAD in own.values() and norms_all_heads(owner):
                found |= {each: _OF_ALL_HEADS.get(style, style) for each, style in own.items()}
        return found

    @cached_property
    def _own_styles(self) -> Mapping[str, str]:
        return (self.declared or Plan(None)).styles_of(self.model)

    @cached_property
    def completion(self) -> Plan:
        """Extra styles where the plan names none; empty in blocks, where completions are not verified."""
        found = completion_of(type(self.model))
        is_meant = self._is_shipped and not self.shard_config.computes_in_blocks
        return found.fitting(self.model, self) if is_meant and found is not None else Plan({})

    @cached_property
    def stages(self) -> Any:
        """The stage layout, inferred from the module tree; None if the model cannot be split."""
        if self.declared is not None:
            return self.declared.stages_of(self.model)
        if getattr(self.model.config, "is_encoder_decoder", False):
            # A plan does not tell which outputs of the encoder its decoder reads.
            derived = proposed_plan(family_of(type(self.model)))
            return None if derived is None else derived.stages_of(self.model)
        # A completion may name towers, too.
        return stage_layout(self.model, layer_paths(self.model, self._own_styles or self.plan))

    def set_model(self, model: nn.Module) -> None:
        """Set the model; forget the plan and the stages of the previous one."""
        super().set_model(model)
        for name in ("plan", "_entries", "_own_styles", "stages", "completion"):
            self.__dict__.pop(name, None)

    def head_counts(self) -> Mapping[str, int]:
        """Return `num_attention_heads` of the configuration and of its sub-configurations, where defined."""
        config = getattr(self.model, "config", None)
        towers = {"": config} | {f"{name}.": getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
        found = {f"{at}num_attention_heads": getattr(each, "num_attention_heads", None) for at, each in towers.items()}
        return {name: count for name, count in found.items() if isinstance(count, int)}

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; all styles of the plan must be known."""
        unknown = sorted({style for style in self.plan.values() if style not in STYLES})
        problems = self._layers_at_random()
        problems += [
            f"tensor-parallel style '{style}' in the plan of {type(self.model).__name__} is not known; "
            f"known are {', '.join(sorted(STYLES))}: use tp_size=1 or a policy"
            for style in unknown
            if self.tp_size > 1
        ]
        if self.shard_config.sequence is not None and not self._splits_sequence():
            problems.append(
                f"sequence_parallelism_mode='{self.shard_config.sequence_parallelism_mode}' needs a policy for "
                f"{type(self.model).__name__}, whose plan does not tell where its tokens meet; "
                "use enable_sequence_parallelism=False"
            )
        problems += self._refused_values()
        if self.tp_size > 1 and not unknown:
            problems += self._check_heads()
        return problems + (self.declared.uneven_counts(self.model, self.tp_size) if self.checks_counts else [])

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table that the plan is lowered to, by paths of the model."""
        cuts_sequence = self.stages is not None and self.shard_config.sequence is not None
        uses_ulysses = cuts_sequence and self.shard_config.uses_ulysses
        table = self._whole_layers() if uses_ulysses else self._cut_layers()
        if cuts_sequence and not uses_ulysses:
            sequence.add_sequence_regions(table, self.model, self.stages, self.shard_config)
        for style, module in self._vocabulary():
            path, _, name = path_of(self.model, module).rpartition(".")
            changes = table.setdefault(path, ModulePolicyDescription()).sub_module_replacement
            if all(change.suffix != name for change in changes):
                changes.append(STYLES[style](self, self.model.get_submodule(path), name))
        return table

    def postprocess(self) -> nn.Module:
        """Log how little is divided, if most of the parameters are whole on every rank."""
        share = divided_share(self.model.parameters())
        if self.tp_size > 1 and share < 0.5:
            name = type(self.model).__name__
            log_once(name, f"keeps most of its layers whole: tp_size={self.tp_size} divides {share:.0%} of its weights")
        return self.model

    def _splits_sequence(self) -> bool:
        """Return whether the layers can process slices of the sequence."""
        if self.shard_config.uses_ulysses:
            return self.exchanges_heads()
        is_known = bool(self._only_layers())
        if not self.shard_config.computes_in_blocks:
            is_known |= self.was_seen("split_gather") or (self.declared is not None and self.declared.splits_sequence)
        return is_known and bool(sequence.divisible_lists(self._cut_layers(), self.model, self.stages))

    def tokens_mix_only_in_attention(self) -> bool:
        """Return whether attention alone mixes tokens, judged by the modules of the layers."""
        return attention_alone_mixes(self._only_layers())

    def exchanges_heads(self) -> bool:
        """Return whether the layers can have parts of sequences between attentions that exchange them for heads."""
        if self.tokens_mix_only_in_attention():
            return True
        lists, way = self._layer_lists(), "all_to_all" if self.shard_config.uses_ulysses else "cp_all_to_all"
        return bool(lists) and self.was_seen(way) and all(map(attention_alone_mixes, lists))

    def shares_sequences(self) -> bool:
        """Return whether attention alone mixes the tokens that the layers process, whatever is in front of them."""
        if self.tokens_mix_only_in_attention():
            return True
        lists = self._layer_lists()
        if len(lists) != 1 or not self.was_seen("cp") or towers_share_configs(self.model, lists[0]):
            return False
        return attention_alone_mixes(lists[0]) or attention_and_mixers_mix(lists[0])

    def was_seen(self, way: str) -> bool:
        """Return whether the family was seen to train right with parts of sequences, see `divides_sequences`."""
        return divides_sequences(type(self.model), way)

    def _layer_lists(self) -> list[list[nn.Module]]:
        return [list(self.model.get_submodule(path)) for path in self.layer_lists]

    def _only_layers(self) -> list[nn.Module]:
        """Return the layers; none if the plan does not tell what they do, or attention is outside the layer list."""
        is_known = self.declared is None or self.declared.splits_sequence
        lists = self._layer_lists() if is_known else []
        return lists[0] if len(lists) == 1 and not attention_outside(self.model, lists[0]) else []

    def _whole_layers(self) -> dict[str, ModulePolicyDescription]:
        """Return the table for full layers that process a part of the tokens, so that gradients are summed."""
        return {
            f"{layout.layers}.{index}": ModulePolicyDescription(
                param_replacement=sequence.own_parameters_per_token(layer, self.shard_config),
                sub_module_replacement=[
                    change
                    for name, child in layer.named_children()
                    for change in sequence.per_token(name, child, self.shard_config)
                ],
            )
            for layout in self.stages.chain
            for index, layer in enumerate(self.model.get_submodule(layout.layers))
        }

    def _cut_layers(self) -> dict[str, ModulePolicyDescription]:
        planned = self._planned()
        table = lowered(self, planned, self._entries)
        for path, owner, name in planned:
            if is_attention(owner) and self.plan[starred(join(path, name))] in ("colwise_gather_output", "colwise_rep"):
                table[path].attribute_replacement["attention_is_replicated"] = True
        for path, description in table.items():
            owner = self.model.get_submodule(path)
            for rule in RULES:
                rule.complete(self, path, owner, description)
            for plan in filter(None, (self.completion, self.declared)):
                description.attribute_replacement.update(plan.local_values(path, owner, self.tp_size))
        return table

    def _planned(self) -> list[tuple[str, nn.Module, str]]:
        """Return (owner path, owner, name of its module or parameter) for everything that the plan names."""
        found = []
        heads = {id(module) for _, module in self._vocabulary()}
        # Expert parallelism distributes full experts, so they must not be sharded again.
        dealt_out = {id(each) for _, each in expert_modules(self.model)} if self.shard_config.shards_experts else ()
        for path, owner in self.model.named_modules():
            keeps_whole = None if self.declared is None else self.declared.keeps_whole
            if (
                (keeps_whole is not None and keeps_whole(owner))
                or id(owner) in dealt_out
                or self._mixes_features(path, owner)
            ):
                continue
            names = [*(name for name, _ in owner.named_children()), *owner._parameters]
            for name in names:
                is_planned = starred(join(path, name)) in self.plan and not self._gets_all_heads(owner, path, name)
                child = getattr(owner, name)
                if is_planned and child is not None and id(child) not in heads and id(child) not in dealt_out:
                    found.append((path, owner, name))
        return found

    def _mixes_features(self, path: str, owner: nn.Module) -> bool:
        """Return whether a feed-forward stays whole, as it takes a function of all features; not Gemma 3n's."""
        parts = (*dict(owner.named_children()), *owner._parameters)
        styles = {self.plan.get(starred(join(path, name))) for name in parts}
        if not (styles & COLUMNS and styles & ROWS) or hasattr(owner, "_gaussian_topk"):
            return False
        found = functions_of_all_features(owner)
        if found:
            log_once(type(self.model).__name__, f"keeps {type(owner).__name__} whole: {min(found)} reads all features")
        return bool(found)

    def _gets_all_heads(self, owner: nn.Module, path: str, name: str) -> bool:
        """Return whether a hybrid's plan for attention's output projection finds its other parts whole."""
        if self.declared is not None and self.declared.styles is not None:
            return False
        if self.plan[starred(join(path, name))] != "rowwise" or not is_attention(owner):
            return False
        others = [self.plan.get(starred(join(path, other))) for other, _ in owner.named_children() if other != name]
        return isinstance(getattr(owner, name), nn.Linear) and not any(others)

    def _vocabulary(self) -> list[tuple[str, nn.Module]]:
        """Return (style, module) of token embeddings and head; they may be tied, so they are sharded identically."""
        embedding, head = (asked(self.model, getter) for getter in GETTERS)
        cut: list[tuple[str, nn.Module]] = []
        if self.declared is not None and not self.declared.cuts_vocabulary_of(self.model):
            return cut
        if type(head) is nn.Linear and path_of(self.model, head):
            cut.append(("gathered_lm_head" if self._reads_logits else "lm_head", head))
        is_tied = head is not None and stored_weight(head) is stored_weight(embedding)
        if isinstance(embedding, nn.Embedding) and (cut or not is_tied):
            # An encoder-decoder has several embeddings, each with the weight of the first or of the head; VisualBERT
            # ties another linear layer to it.
            tied = {id(stored_weight(each)) for each in (embedding, *(module for _, module in cut))} - {id(None)}
            same = [each for each in self.model.modules() if id(stored_weight(each)) in tied]
            cut += [("embedding_rowwise", each) for each in same if isinstance(each, nn.Embedding)]
            cut += [("gathered_lm_head", each) for each in same if type(each) is nn.Linear and each is not head]
        return cut

    @property
    def _reads_logits(self) -> bool:
        """Whether the model processes the full logits (adds a bias to them)."""
        return hasattr(self.model, "final_logits_bias") or (self.declared is not None and self.declared.whole_logits)

    def heads_of(self, owner: nn.Module, name: str, features: int) -> int | None:
        """Return the number of heads of a projection to or from `features`; None if it is not part of attention."""
        if not is_attention(owner) and not attends(owner):
            return None
        config = getattr(owner, "config", None) or text_config(getattr(self.model, "config", None))
        head_dim = getattr(owner, "head_dim", None)
        is_key_or_value = name.split(".")[0] in ("k_proj", "v_proj", "key", "value")
        if is_key_or_value and isinstance(head_dim, int) and features % head_dim == 0:
            return features // head_dim
        counts = [getattr(owner, name, None) for name in HEAD_COUNTS] + [getattr(config, "num_attention_heads", None)]
        heads = next((count for count in counts if isinstance(count, int)), None)
        return heads if heads is not None and features % heads == 0 else None

    def _check_heads(self) -> list[str]:
        problems = {}
        for path, owner, name in self._planned():
            module = getattr(owner, name)
            if self.plan[starred(join(path, name))] != "colwise" or not isinstance(module, nn.Linear):
                continue
            can_copy = name in ("k_proj", "v_proj")
            if name == "linear":  # a projection inside of a module of its own (Moshi)
                path, _, name = path.rpartition(".")
                owner = self.model.get_submodule(path)
            count = self.heads_of(owner, name, module.out_features)
            is_shared_out = count is None or count % self.tp_size == 0
            is_copied = can_copy and count is not None and self.tp_size % count == 0
            if not is_shared_out and not is_copied:
                problems[count] = f"tp_size={self.tp_size} does not divide the {count} heads of '{path}.{name}'"
        return [f"{problem}; use {divisors_phrase(count)}" for count, problem in problems.items()]


def asked(model: nn.Module, getter: str) -> nn.Module | None:
    """Call a model's embedding getter; None if the model has no such getter or embedding."""
    try:
        return getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None
