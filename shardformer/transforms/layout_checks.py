"""Layers that a user has customized before sharding, and reasons why a layout conflicts with what a model computes.

A parallel layer that replaced a customized one would lose its hooks, its forward or its weights. So the layer stays
whole on every rank, reads and returns full activations, and its hooks see the same values as in plain PyTorch; or it is
refused by name.

A model whose inputs cannot be sharded as one sequence (an encoder-decoder, or one that embeds or masks its tokens in
its own way) shares sequences between attentions only, which exchange parts for heads (arXiv 2309.14509).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardformer import layers
from shardformer.attention import log_once, uses_registry
from shardformer.context_parallel.attention import RING
from shardformer.distributed.collectives import all_gather, local_slice
from shardformer.distributed.sequence_parallel import SEQ_DIM, SequenceParallel
from shardformer.layers.experts import expert_modules, is_experts
from shardformer.layers.linear import in_features, out_features
from shardformer.layers.parallel_module import ParallelModule
from shardformer.loss.terms import router_loss_of, routers_are_asked
from shardformer.matmul.quantised import kind_of_layer
from shardformer.policies.base import LAYERS_AT_RANDOM, Policy
from shardformer.policies.mixers import MIXER
from shardformer.policies.module_edits import read_norms_of_heads, shard_own_parameter, shard_weights_of_heads
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.policies.registry import head_loss_of
from shardformer.shard_config import ShardConfig
from shardformer.transforms import sequences
from shardformer.utils.derived_modules import hook_on, hooked_modules, user_code
from shardformer.utils.module_paths import divisors_phrase, has_module, told

if TYPE_CHECKING:
    from shardformer.shardformer import ModelSharder


@dataclass(frozen=True)
class Replacement:
    """A planned replacement of a module."""

    path: str
    native: nn.Module
    target: type[ParallelModule]  # the class that replaces it
    arguments: Mapping[str, Any]  # further arguments of `from_native_module`

    @property
    def cuts_outputs(self) -> bool:
        """Whether the output features of the replacement are sharded over ranks."""
        cuts = issubclass(
            self.target, layers.ColumnParallelLinear | layers.MultiQueryLinear | layers.HeadParallelEmbedding
        )
        return cuts and self.target.shards_layer and not self.arguments.get("gather_output")

    @property
    def cuts_inputs(self) -> bool:
        """Whether the input features of the replacement are sharded over ranks."""
        return issubclass(self.target, layers.RowParallelLinear) and not self.arguments.get("splits_input")

    @property
    def cut(self) -> Any:
        """What decides which shard of its parameters the replacement holds; an embedding has the rows of its head."""
        is_vocabulary = issubclass(
            self.target, layers.VocabParallelEmbedding | layers.VocabParallelLMHead | layers.GatheredLMHead
        )
        return "vocabulary" if is_vocabulary else (self.target, self.arguments)


class KeptLayers:
    """The layers that stay whole on every rank.

    Args:
        replacements: the replacements of the policy.
        config: the sharding options.

    Attributes:
        reasons: module -> phrase that names what a replacement would lose.
    """

    def __init__(self, replacements: Sequence[Replacement], config: ShardConfig) -> None:
        self.replacements, self.config = list(replacements), config
        self.reasons: dict[nn.Module, str] = {}
        for each in self.replacements:
            if (reason := _reason(each)) is not None:
                self.reasons[each.native] = reason
        self.reasons |= dict.fromkeys(self._cut_apart(), "a weight that it shares with a layer that is cut otherwise")
        while tied := self._tied_to_kept():
            self.reasons |= dict.fromkeys(tied, "a weight that it shares with a layer that stays whole")

    def __contains__(self, module: nn.Module) -> bool:
        return module in self.reasons

    @property
    def paths(self) -> list[str]:
        """Paths of the layers that stay whole."""
        return [each.path for each in self.replacements if each.native in self.reasons]

    def problems(self, model: nn.Module) -> list[str]:
        """Return a sentence for each customization that sharding cannot preserve."""
        return [*self._cannot_stay(), *self._cannot_be_cut(), *self._hooks_on_parts(model)]

    def tell(self, name: str) -> None:
        """Log which layers of the model `name` are not sharded."""
        kept = [each for each in self.replacements if each.native in self.reasons]
        if kept and self.config.tensor_parallel_size > 1:
            more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
            log_once(name, f"keeps {kept[0].path}{more} whole on every rank, because of {self.reasons[kept[0].native]}")

    def _cut_apart(self) -> list[nn.Module]:
        """Return layers that share a parameter of which replacements, but the user's, hold different shards."""
        sharing: dict[int, list[Replacement]] = {}
        for each in self.replacements:
            for parameter in each.native._parameters.values():
                if parameter is not None and _is_ours(each):
                    sharing.setdefault(id(parameter), []).append(each)
        apart = [group for group in sharing.values() if any(each.cut != group[0].cut for each in group)]
        return [each.native for group in apart for each in group if each.native not in self.reasons]

    def _tied_to_kept(self) -> list[nn.Module]:
        """Return layers to be sharded that share a parameter with a layer that stays whole."""
        held = {id(parameter) for module in self.reasons for parameter in module._parameters.values()}
        held.discard(id(None))
        return [
            each.native
            for each in self.replacements
            if each.native not in self.reasons
            and any(id(parameter) in held for parameter in each.native._parameters.values())
        ]

    def _cannot_stay(self) -> Iterator[str]:
        for each in self.replacements:
            reason = self.reasons.get(each.native)
            if reason is None:
                continue
            start = f"{each.path} (a {type(each.native).__name__}) has {reason}, which"
            if not each.target.can_stay_whole:
                yield f"{start} would be lost where tensor parallelism cuts it; use tp_size=1 (dp or pp)"
            elif self.config.sequence is not None and each.target.shards_layer:
                yield f"{start} sequence parallelism cannot keep; use enable_sequence_parallelism=False"
            elif (side := _unknown_size(each)) is not None:
                yield (
                    f"{start} tensor parallelism keeps whole, but it does not say how many features it has; give it "
                    f"the attribute {side}, or use tp_size=1 (dp or pp)"
                )

    def _cannot_be_cut(self) -> Iterator[str]:
        """Yield a sentence for the first layer whose quantised weight has no border where ranks could be cut."""
        found = [each for each in self.replacements if each.native not in self.reasons]
        told = [(each.path, _quantised_problem(each)) for each in found]
        told = [(path, problem) for path, problem in told if problem is not None]
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        yield from (f"{path}{more} has {problem}" for path, problem in told[:1])

    def _hooks_on_parts(self, model: nn.Module) -> Iterator[str]:
        """Yield a sentence for each hook that would see only a rank's share of the activations."""
        if self.config.context is not None or self.config.sequence is not None:
            what = "cp_size above 1" if self.config.context is not None else "sequence parallelism"
            inner = [(path, hook) for path, _, hook in hooked_modules(model) if any(map(str.isdigit, path.split(".")))]
            for path, hook in inner[:1]:
                yield f"{path} has {hook}, which would see a part of each sequence under {what}; use dp, pp or tp alone"
            return
        outputs = [each.path for each in self.replacements if each.cuts_outputs]
        inputs = [each.path for each in self.replacements if each.cuts_inputs]
        replaced = {each.path for each in self.replacements}
        for path, module, hook in hooked_modules(model):
            if path in replaced:
                continue
            reads, returns = _any_below(path, inputs), _any_below(path, outputs)
            parent = path.rpartition(".")[0]
            lies_between = not (reads or returns) and any(each.rpartition(".")[0] == parent for each in outputs)
            sees_share = lies_between and not any(True for _ in module.parameters())
            if reads != returns or sees_share or (is_experts(module) and self.config.tensor_parallel_size > 1):
                yield (
                    f"{path} has {hook}, which would see a rank's share of its activations under tensor parallelism; "
                    f"hook a linear layer or the whole of {parent or 'the model'}, or use tp_size=1 (dp or pp)"
                )


def _reason(each: Replacement) -> str | None:
    """Return what a replacement would lose, or None; the user's own handle everything except hooks."""
    reason = user_code(each.native) if _is_ours(each) else hook_on(each.native)
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    if reason is None and isinstance(each.native, nn.Embedding):
        reason = next((f"the option {name}" for name in options if getattr(each.native, name)), None)
    return reason


def _quantised_problem(each: Replacement) -> str | None:
    """Return why a quantised layer cannot be replaced; None if it can, or if it is not quantised."""
    kind = kind_of_layer(each.native)
    if kind is not None and not each.target.takes_kernels:
        return f"{kind.name} weights, which a {each.target.__name__} cannot cut; use tp_size=1 (dp, pp work)"
    return None if kind is None else kind.problem(each.native)


def _is_ours(each: Replacement) -> bool:
    return each.target.__module__.startswith("shardformer.")


def _unknown_size(each: Replacement) -> str | None:
    """Return the name of a feature count that is required but cannot be determined; None if there is none."""
    sides = {"out_features": (each.cuts_outputs, out_features), "in_features": (each.cuts_inputs, in_features)}
    for name, (is_needed, ask) in sides.items():
        try:
            if is_needed:
                ask(each.native)
        except TypeError:
            return name
    return None


def _any_below(path: str, paths: Sequence[str]) -> bool:
    return any(not path or each.startswith(f"{path}.") for each in paths)


def check_policy(sharder: ModelSharder) -> None:
    """Check the policy against the full model before any change; ValueError with all reasons."""
    problems = [*sharder.policy.check(), *_tower_problems(sharder)]
    for part in sharder.policy.parts:
        if routers_are_asked(part.model, {}):
            problems += router_problems(part.model, sharder.config)
    if sharder.config.stage_manager.num_stages > 1:
        problems += _stage_problems(sharder)
    if sharder.config.tensor_parallel_size > 1:
        problems += _table_problems(sharder)
    if not problems:
        problems += sharder.kept.problems(sharder.model)
    for part in sharder.policy.parts if sharder.config.uses_ulysses else ():
        problems += exchange_problems(part.model, part, sharder.config)
    if sharder.config.context is not None:
        problems += context_problems(sharder.model, sharder.policy, sharder.config)
    if sharder.config.sequence is not None or sharder.layer_sequence is not None:
        problems += _place_problems(sharder)
    problems += check_experts(sharder.model, sharder.config)
    if problems:
        raise ValueError("; ".join(problems))


def sequence_problems(sharder: ModelSharder) -> list[str]:
    """Return the reasons why the family does not support sequence parallelism."""
    return [
        problem for problem in (*sharder.policy.check(), *_tower_problems(sharder)) if "sequence_parallelism" in problem
    ]


def _tower_problems(sharder: ModelSharder) -> list[str]:
    layout = sharder.policy.stages
    if sharder.config.sequence is None or layout is None or layout.next_layers is None or sharder.policy.splits_towers:
        return []
    return [
        f"enable_sequence_parallelism=True is not supported for the several layer lists of "
        f"{type(sharder.model).__name__}; use enable_sequence_parallelism=False"
    ]


def _stage_problems(sharder: ModelSharder) -> list[str]:
    layout = sharder.policy.stages
    if layout is None:
        return [f"{type(sharder.model).__name__} cannot be cut into pipeline stages; use pp_size=1"]
    try:
        missing = sharder.cut.unassigned()
    except ValueError as error:
        return [str(error)]
    return (
        [f"modules {missing} are neither first, last nor on every stage in the family's StageLayout"] if missing else []
    )


def _table_problems(sharder: ModelSharder) -> list[str]:
    problems, claimed = [], set()
    for path, module, description in sharder.described():
        if description.param_replacement:
            claimed.add(path)
        for replacement in description.sub_module_replacement:
            claimed.add(f"{path}.{replacement.suffix}".lstrip("."))
            if not replacement.ignore_if_not_exist and not has_module(module, replacement.suffix):
                names = [name for name, _ in module.named_modules() if name]
                near = difflib.get_close_matches(replacement.suffix, names, n=3) or names[:5]
                problems.append(
                    f"{type(module).__name__} has no sub-module '{replacement.suffix}'; the nearest are {near}"
                )
    if sharder.policy.replicate_unlisted:
        return problems
    kept = sharder.kept.paths
    modules = dict(sharder.model.named_modules(remove_duplicate=False))
    done = {modules[path] for path in claimed if path in modules}  # an object may have several paths
    unclaimed = [
        path
        for path in _layer_modules_with_parameters(sharder)
        if modules[path] not in done and not any(path.startswith(f"{each}.") for each in kept)
    ]
    if unclaimed:
        problems.append(
            f"{type(sharder.policy).__name__} says nothing about {told(sharder.model, unclaimed)}, so that tensor "
            "parallelism cannot tell what they see; use tp_size=1 (dp or pp), sharding_dim=-1, which cuts each "
            "linear layer by itself, or name them in a TPInfo or a custom_policy"
        )
    return problems


def _place_problems(sharder: ModelSharder) -> list[str]:
    """Return what is shared by hand between places that see parts of sequences and places that see whole ones."""
    way_out = "leave out enable_sequence_parallelism" if sharder.config.sequence is not None else "use cp_size=1"
    first: dict[nn.Module, str] = {}
    for path in sharder.policy.layer_lists:
        for index, layer in sharder.model.get_submodule(path)._modules.items():
            if first.setdefault(layer, f"{path}.{index}") != f"{path}.{index}":
                return [
                    f"{first[layer]} and {path}.{index} are one object, which would cut its sequences twice; "
                    f"{way_out}, or make them two layers with the same parameters"
                ]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in sharder.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter in _of_parts(sharder):
        inside = [any(name.startswith(f"{path}.") for path in sharder.policy.layer_lists) for name in names[parameter]]
        if not all(inside) and any(inside):
            pair = names[parameter][inside.index(True)], names[parameter][inside.index(False)]
            return [
                f"{pair[0]}, of which a rank sees a part of each sequence, is also {pair[1]}, which sees whole "
                f"sequences; {way_out}, or give each a parameter of its own"
            ]
    return []


def _of_parts(sharder: ModelSharder) -> Iterator[nn.Parameter]:
    """Yield the parameters inside the layers whose gradients are of a part of each sequence."""
    if sharder.config.uses_ulysses or sharder.layer_sequence is not None:
        for path in sharder.policy.layer_lists:
            yield from sharder.model.get_submodule(path).parameters()
    else:
        for _, native, replacement in sharder.sub_modules():
            if replacement.partial_gradient:
                yield from native.parameters()


def _layer_modules_with_parameters(sharder: ModelSharder) -> list[str]:
    """Return the paths of modules inside the layers that have parameters of their own."""
    return [
        f"{path}.{index}.{inner}".rstrip(".")
        for path in sharder.policy.layer_lists
        for index, layer in sharder.model.get_submodule(path).named_children()
        for inner, module in layer.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]


def router_problems(model: nn.Module, config: ShardConfig) -> list[str]:
    """Return layouts that conflict with a load-balancing loss, which reads the scores of all layers and tokens."""
    routers = router_loss_of(model)
    adds_up = routers is not None and routers.adds_up
    stages = config.stage_manager.num_stages
    spread = {
        f"pp_size={stages}": stages > 1 and not adds_up,
        "cp_size above 1": config.context is not None and not adds_up,
        "sequence_parallelism_mode='all_to_all'": config.uses_ulysses and not adds_up,
    }
    return [
        f"output_router_logits=True adds a loss over the router scores of all layers and tokens, which {what} "
        "spreads over ranks; use output_router_logits=False, or another layout"
        for what, is_asked in spread.items()
        if is_asked
    ]


def exchange_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """Return what keeps `all_to_all` from exchanging heads: it needs attention that uses the registry."""
    mode, name = "sequence_parallelism_mode='all_to_all'", type(model).__name__
    attends = policy.own_attention or any(uses_registry(module) for module in model.modules())
    if not attends or not policy.supports_ulysses:
        return [f"{mode} cannot reach the attention of {name}; use 'split_gather' or no sequence parallelism"]
    if policy.stages is not None and (reason := next(sequences.counting_reasons(model, policy), None)) is not None:
        return [
            f"{mode} cannot divide the sequences of {name}, {reason}; use 'split_gather' or no sequence parallelism"
        ]
    size = config.tensor_parallel_size
    kv_heads = getattr(model.config, "num_key_value_heads", None) or size
    if kv_heads % size and size % kv_heads:
        return [f"{mode} with tp_size={size} neither divides num_key_value_heads={kv_heads} nor is a multiple of it"]
    return []


class LayerSequence(SequenceParallel):
    """The parts of sequences that context-parallel ranks have inside of layers.

    What is around the layers is computed on every rank, with a copy of the loss that is divided by the number of ranks.
    So a rank has a summand of each gradient, which are added up with those of the replicas.
    """

    def split(self, x: Tensor) -> Tensor:
        """Split [batch, seq, hidden] -> [batch, seq/cp, hidden]; the gradient of other parts is zero on this rank."""
        return local_slice(x, SEQ_DIM, self.group)

    def _gather_whole(self, x: Tensor) -> Tensor:
        return all_gather(x, SEQ_DIM, self.group, self.length)


_VOCABULARY = (layers.VocabParallelEmbedding, layers.VocabParallelLMHead, layers.GatheredLMHead)
_LAYERS = (
    *_VOCABULARY,
    layers.ColumnParallelLinear,
    layers.RowParallelLinear,
    layers.HeadParallelEmbedding,
    layers.ParallelDropout,
    layers.FusedLayerNorm,
    layers.FusedRMSNorm,
)
_STYLES = frozenset(
    ("colwise", "colwise_gather_output", "colwise_rep", "fused_colwise", "rowwise", "packed_colwise", "packed_rowwise")
    + ("embedding_rowwise", "embedding_colwise", "dropout", "moe_tp_experts", "cast_by_use", "local_params")
    + ("replicate", "sequence_parallel", "replicated_with_grad_allreduce")
    + (MIXER,)  # whole in blocks
)


class InBlocks(ShardConfig):
    """Options as if layers were computed in so many blocks."""

    count, computes_in_blocks = 1, True

    @property
    def tensor_parallel_size(self) -> int:
        """Number of parts that each layer is computed in."""
        return self.count


def block_problems(sharder: ModelSharder, count: int) -> list[str]:
    """Return the reasons why a whole model cannot be computed in `count` blocks; empty if it can."""
    policy = sharder.policy
    if isinstance(policy, PlanPolicy):
        unknown = [path for path, style in policy.plan.items() if style not in _STYLES]
    else:
        unknown = [name for name, table in sharder.table.items() if table.param_replacement or table.method_replacement]
    layouts = policy.stages.chain if policy.stages is not None else []
    sent = {name for each in layouts for name in (*each.carried_inputs, *each.shared_states)}
    sent -= {name for each in layouts for name in each.head_inputs}
    unknown += [f"layers that pass on {name}" for name in sorted(sent)]
    problems = [f"{type(sharder.model).__name__} has {name}, which a rank computes at once" for name in unknown[:1]]
    problems += [f"{path} is customized and stays whole" for path in sharder.kept.paths]
    return problems + list(_of_layers(sharder, count))


def _of_layers(sharder: ModelSharder, count: int) -> Iterator[str]:
    for path, native, replacement in sharder.sub_modules():
        target, options = replacement.target_module, replacement.kwargs or {}
        if target is None or target in _VOCABULARY or options.get("divisible_by") or options.get("gather_output"):
            continue
        if target not in _LAYERS or options.get("splits_input"):
            yield f"{path} becomes a {target.__name__}, which a rank computes at once"
        elif target in (layers.ColumnParallelLinear, layers.RowParallelLinear):
            is_row, heads = target is layers.RowParallelLinear, options.get("num_heads")
            features = in_features(native) if is_row else options.get("part_size") or out_features(native)
            parts = {(part.size // part.unit, part.unit > 1) for part in options.get("parts", ())}
            for units, are_heads in sorted(parts) or [(heads or features, heads is not None)]:
                if units % count and (is_row or parts or count % units):
                    yield f"{path} has {units} {'heads' if are_heads else 'features'}, which {count} does not divide"
    for path, module, description in sharder.described():
        for change in description.param_replacement:
            if isinstance(change, partial) and change.func in (read_norms_of_heads, shard_weights_of_heads):
                yield f"{path}.{change.keywords['name']} has a norm for each head, which a rank computes at once"
            elif isinstance(change, partial) and change.func is shard_own_parameter:
                options = change.keywords
                parameter = getattr(module, options["name"])
                size = parameter.shape[max(parameter.dim() - options["from_end"], 0)] // options["num_parts"]
                if size % count:
                    yield f"{path}.{options['name']} has {size} features, which {count} does not divide"


def check_experts(model: nn.Module, config: ShardConfig) -> list[str]:
    """Return sentences on what prevents sharding the experts of the whole model, or giving them a capacity."""
    name, size, factor = type(model).__name__, config.expert_parallel_size, config.expert_capacity_factor
    found = list(expert_modules(model)) if size > 1 or factor is not None else []
    problems = []
    if size > 1 and not found:
        problems.append(f"ep_size={size} finds no experts in stacked parameters in {name}; use ep_size=1")
    if factor is not None and not found:
        problems.append(
            f"expert_capacity_factor={factor} finds no experts in stacked parameters in {name}; "
            "use expert_capacity_factor=None"
        )
    if factor is not None and config.uses_ulysses:
        problems.append(
            f"expert_capacity_factor={factor} needs whole sequences, which 'all_to_all' sequence parallelism cuts; "
            "use 'split_gather' or expert_capacity_factor=None"
        )
    uneven: dict[int, str] = {}
    for path, module in found:
        if module.num_experts % size:
            uneven.setdefault(module.num_experts, path)  # report only the first layer of each expert count
    return problems + [
        f"ep_size={size} does not divide the {count} experts of '{path}'; use {divisors_phrase(count)}"
        for count, path in uneven.items()
    ]


def context_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """Return the reasons why the sequences of a model cannot be sharded over ranks; empty if there are none."""
    asked, name = f"cp_size={config.context.size}", type(model).__name__
    is_ring = config.context_parallel_mode == RING
    reason = sequences.reason_against_sharing(model, policy)
    if reason is not None and (is_ring or not _attends_by_heads(model, policy)):
        way_out = "sequence_parallelism_mode='all_to_all', or " if _attends_by_heads(model, policy) else ""
        return [f"{asked} cannot share the sequences of {name}, {reason}; use {way_out}cp_size=1"]
    if reason is not None:
        found = [
            problem
            for part in policy.parts
            for problem in (*_layer_problems(part.model, part, config), *_head_problems(part, config, "cp_size=1"))
        ]
        return list(dict.fromkeys(found))
    num_stages = config.stage_manager.num_stages
    if num_stages > 1 and _embeds_outside(model, policy):
        return [
            f"{asked} cannot share the sequences of {name} over pp_size={num_stages} stages, because its tokens are "
            "embedded outside of the module that reads them; use pp_size=1, or cp_size=1"
        ]
    if config.sequence is not None and sequences.mixers_of_layers(model, policy):
        return [_shared_twice(model, config)]
    return [] if is_ring else _head_problems(policy, config, "'ring_attn'")


def _attends_by_heads(model: nn.Module, policy: Policy) -> bool:
    """Return whether layers can exchange parts of sequences for heads, see `transforms/layout_checks.py`."""
    attends = policy.own_attention or any(map(uses_registry, model.modules()))
    return policy.stages is not None and bool(attends) and policy.exchanges_heads()


def _layer_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> Iterator[str]:
    """Yield why parts of sequences inside of layers would compute something else, or not at all."""
    asked, name = f"cp_size={config.context.size}", type(model).__name__
    for reason in sequences.counting_reasons(model, policy):
        yield f"{asked} cannot share the sequences of {name}, {reason}; use cp_size=1"
    if config.sequence is not None:
        yield _shared_twice(model, config)
    if (head := head_loss_of(model)) is not None and head.routers is not None:
        yield f"{asked} cannot share the sequences of {name}, whose routers see whole ones; use cp_size=1"
    for option in LAYERS_AT_RANDOM:
        if value := getattr(model.config, option, 0.0):
            yield f"{option}={value} skips layers at random, other ones on each rank of {asked}; use {option}=0.0"


def _shared_twice(model: nn.Module, config: ShardConfig) -> str:
    return (
        f"cp_size={config.context.size} and enable_sequence_parallelism=True both share the layers of "
        f"{type(model).__name__}; use enable_sequence_parallelism=False, or cp_size=1"
    )


def _head_problems(policy: Policy, config: ShardConfig, way_out: str) -> list[str]:
    size, tp_size, problems = config.context.size, config.tensor_parallel_size, []
    kv_heads = getattr(policy.model.config, "num_key_value_heads", None)
    for count in dict.fromkeys(policy.head_counts().values()):
        heads = count // tp_size
        of_keys = max((kv_heads or heads * tp_size) // tp_size, 1)
        if heads % size or (of_keys % size and size % of_keys):
            problems.append(
                f"sequence_parallelism_mode='all_to_all' shares {heads} heads ({of_keys} of keys) out over "
                f"cp_size={size} ranks, which does not divide them; use {way_out}, or a cp_size that does"
            )
    return problems


def _embeds_outside(model: nn.Module, policy: Policy) -> bool:
    """Return whether a module around the reader of tokens embeds them, to insert images: stages send it parts."""
    reader = sequences.reader_of_tokens(model, policy)
    path = next(name for name, module in model.named_modules() if module is reader)
    return not policy.tokens_mix_only_in_attention() and "." in path
