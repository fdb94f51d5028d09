"""Policy: the description of how a model family is sharded, applied by `ModelSharder`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardformer.shard_config import ShardConfig
from shardformer.utils.module_paths import divisors_phrase, join

if TYPE_CHECKING:
    from shardformer.context_parallel.zigzag import Positions
    from shardformer.layers.parallel_module import ParallelModule
    from shardformer.loss.heads import HeadLosses
    from shardformer.stages.stage import StageLayout
    from shardformer.utils.derived_modules import ModuleChange

LAYERS_AT_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # probabilities that a layer is skipped


class Origin(Enum):
    """Who says how a part of a model is cut."""

    USER = "a policy or a plan of the user's"
    TP_INFO = "a TPInfo of the user's"
    SLOTS = "slots of the user's"
    UNIFORM = "sharding_dim, each linear layer by itself"
    BACKBONES = "the policies of the models inside of the user's module"
    FAMILY = "this package's table of the family"
    DECLARED = "this package's plan of the family"
    TRANSFORMERS = "the plan of transformers"
    DERIVED = "a plan that was derived from the family's models"
    COMPLETED = "what was derived for parts that the family's plan leaves whole"
    MIXER = "the rule of a kind of layer"


@dataclass(frozen=True)
class PlanEntry:
    """What a plan says about one part of a model."""

    style: str  # what is done to the part: a tensor-parallel style, or the class that replaces it
    origin: Origin
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the style, where a user gives some


@dataclass
class SubModuleReplacementDescription:
    """One sub-module to replace.

    Attributes:
        suffix: path of the sub-module relative to the described module.
        target_module: the class whose `from_native_module` creates the replacement; None keeps the sub-module
            replicated, and every rank computes the same result with it.
        kwargs: further arguments of `from_native_module`.
        ignore_if_not_exist: whether the sub-module may be missing (a cross-attention, a gate).
        reads: name of the input; column-parallel sub-modules with the same input share one all-reduce.
        partial_gradient: the parameters are replicated, but each rank applies them to a part of the tokens or heads
            only, so their gradients are summed over the axis.
        gathers_sequence: whether the sub-module starts a tensor-parallel region; under sequence parallelism its input
            is gathered.
    """

    suffix: str
    target_module: type[ParallelModule] | None
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False
    reads: str | None = None
    partial_gradient: bool = False
    gathers_sequence: bool = False


# What is done to one part of a module: another module in its place, or a change of the module itself.
PartChange = SubModuleReplacementDescription | Callable[[nn.Module], None]


@dataclass
class ModulePolicyDescription:
    """The changes to each module of one class.

    Attributes:
        attribute_replacement: attribute name -> value on this rank.
        param_replacement: functions that change the module's own parameters in place. One that returns an object of a
            derived class replaces the module by it.
        sub_module_replacement: the sub-modules to replace.
        method_replacement: method name -> function that is bound to the module.
        fusions: functions that fuse operators of the module after its sub-modules are replaced, in place or like
            `param_replacement`.
        gathers_sequence: whether the module starts a tensor-parallel region; under sequence parallelism its input is
            gathered.
    """

    attribute_replacement: dict[str, Any] = field(default_factory=dict)
    param_replacement: list[ModuleChange] = field(default_factory=list)
    sub_module_replacement: list[SubModuleReplacementDescription] = field(default_factory=list)
    method_replacement: dict[str, Callable] = field(default_factory=dict)
    gathers_sequence: bool = False
    fusions: list[ModuleChange] = field(default_factory=list)


class Policy(ABC):
    """Base class of the descriptions of how one model family is sharded.

    A subclass defines `module_policy` (keys are class names or classes of the model's modules) and, for pipeline
    parallelism, `stages`. `set_model` and `set_shard_config` are called first, so that a table can read sizes.

    Attributes:
        family: name of the family in transformers, `transformers.models.<family>.modeling_<family>`; None for a policy
            of another model.
        module: the module of the family's classes, if it is a different one.
        prefix: prefix of the family's class names.
        heads: class names, without the prefix, of the models that the policy supports.
        stages: where the family can be split into pipeline stages; None if it cannot.
        supports_sequence_parallel: whether the table marks where tensor-parallel regions start and what is between
            them, so that activations between regions can be sharded along the sequence. Must be set by the class that
            defines the table, or by a subclass of it.
        splits_towers: whether `supports_sequence_parallel` also holds for several consecutive layer lists.
        head_losses: class name of a head, or suffix of class names -> function from the model to the loss of its head,
            or to None if the model's forward computes it; the longest name counts. Must be set by the class that names
            the heads: it is not inherited. The loss of a head that it lacks is the usual one for its suffix
            (`USUAL_HEAD_LOSSES`) if its forward calls transformers' `loss_function`, and that of its forward otherwise.
        supports_ulysses: whether the attention supports an all-to-all that trades sequence shards for head shards.
        own_attention: class name of an attention that the model's own code computes -> the class whose forward calls a
            kernel of the registry instead; it is used where an attention backend or `all_to_all` is asked for.
        repeats_layers: whether a layer may run several times, so that pipeline stages share its parameters.
        uneven_heads: whether ranks may have different numbers of heads, because the attention derives the number from
            the weights.
        shared_heads: what users call `num_key_value_heads`, which ranks may copy; None where none may.
        names_norms: whether the table names the norms; if not, they are found by what their classes compute.
        replicate_unlisted: whether modules that the table does not name are replicated instead of causing an error.
        cuts_attention: whether attention heads are sharded over ranks.
        needs: configuration field -> the only value with which the family can be sharded.
        reads_hidden_states: class names of models whose heads read the hidden states of all layers.
        inner: policies of parts of the model, whose reasons against sharding are also this one's.
        origin: who wrote the policy.
        plan: tensor-parallel style of each path of the model, with `*` for numbers; empty for a table of classes.
    """

    origin = Origin.USER

    family: str | None = None
    module: str = ""
    prefix: str = ""
    heads: tuple[str, ...] = ()
    stages: StageLayout | None = None
    supports_sequence_parallel = False
    head_losses: HeadLosses = {}
    splits_towers = False
    supports_ulysses = True
    own_attention: Mapping[str, type[nn.Module]] = {}
    repeats_layers = False
    uneven_heads = False
    shared_heads: str | None = None
    names_norms = True
    replicate_unlisted = False
    cuts_attention = True
    needs: Mapping[str, Any] = {}
    reads_hidden_states: Collection[str] = ()
    inner: Sequence[Policy] = ()
    plan: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.shard_config = ShardConfig()

    def set_model(self, model: nn.Module) -> None:
        """Set the model whose attributes the policy reads."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the sharding options that the policy reads."""
        self.shard_config = shard_config

    @property
    def tp_size(self) -> int:
        """Number of ranks that the weights of a layer are sharded over."""
        return 1 if self.shard_config.uses_ulysses else self.shard_config.tensor_parallel_size

    @property
    def base_path(self) -> str:
        """Path of the base model (which contains the layers) inside the model; "" if the model is the base model."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix and hasattr(self.model, prefix) else ""

    @property
    def layer_lists(self) -> list[str]:
        """Paths, in the model, of the lists of layers that stages are cut from; none if there are none."""
        return [join(self.base_path, each.layers) for each in (self.stages.chain if self.stages is not None else ())]

    @property
    def parts(self) -> Sequence[Policy]:
        """The policies of the models of transformers that the model has; stages are cut from the first."""
        return (self,)

    def tokens_mix_only_in_attention(self) -> bool:
        """Return whether attention is the only operation that mixes tokens of different positions."""
        return True

    def shares_sequences(self) -> bool:
        """Return whether attention alone mixes the tokens that the layers process, whatever is in front of them."""
        return self.tokens_mix_only_in_attention()

    def position_counter(self) -> Positions:
        """Return the default position ids' function (None: the base model's rule), before partitioning."""
        base = self.model.get_submodule(self.base_path)
        embeddings = getattr(base, "embeddings", None)
        if not hasattr(embeddings, "create_position_ids_from_input_ids"):
            return lambda _: None
        padding = embeddings.padding_idx

        def behind_padding(inputs: Mapping[str, Any]) -> Tensor:
            if inputs.get("input_ids") is not None:
                return embeddings.create_position_ids_from_input_ids(inputs["input_ids"], padding)
            return embeddings.create_position_ids_from_inputs_embeds(inputs["inputs_embeds"], padding)

        return behind_padding

    def head_counts(self) -> Mapping[str, int]:
        """Return head counts that tp_size must divide, by config attribute, `num_attention_heads` first."""
        config = self.model.config
        return {"num_attention_heads": config.num_attention_heads}

    def check(self) -> list[str]:
        """Return a sentence for each reason why the model cannot be sharded as requested; empty if it can."""
        problems = []
        config = getattr(self.model, "config", None)
        if self.shard_config.sequence is not None and getattr(config, "add_cross_attention", False):
            problems.append(
                "enable_sequence_parallelism=True does not support add_cross_attention=True; "
                "use enable_sequence_parallelism=False"
            )
        if self.shard_config.sequence is not None and not self._may_cut_sequence():
            problems.append(
                f"enable_sequence_parallelism=True is not supported for {type(self.model).__name__}: "
                f"{type(self).__name__} does not say supports_sequence_parallel = True; "
                "use enable_sequence_parallelism=False"
            )
        problems += [*self._layers_at_random(), *self._refused_values(), *self._hidden_states_apart()]
        shared = None if self.shared_heads is None else config.num_key_value_heads
        if shared is not None and shared % self.tp_size and self.tp_size % shared and not self.uneven_heads:
            clash = f"tp_size={self.tp_size} neither divides {self.shared_heads}={shared} nor is a multiple of it"
            problems.append(f"{clash}; use {divisors_phrase(shared)}")
        problems += [problem for policy in self.inner for problem in policy.check()]
        size = self.shard_config.tensor_parallel_size
        is_uneven = self.uneven_heads and not self.shard_config.uses_ulysses
        return problems + [
            f"tp_size={size} does not divide {name}={count}; use {divisors_phrase(count)}"
            for name, count in self.head_counts().items()
            if count % size and not (is_uneven and count >= size)
        ]

    def _layers_at_random(self) -> list[str]:
        """Return the options by which the model skips layers at random, if it is cut into stages."""
        config = getattr(self.model, "config", None)
        found = {name: getattr(config, name, 0.0) for name in LAYERS_AT_RANDOM}
        return [
            f"{name}={value} skips layers at random, which a pipeline cannot; use {name}=0.0"
            for name, value in found.items()
            if value and self.shard_config.stage_manager.num_stages > 1
        ]

    def _refused_values(self) -> list[str]:
        """Return a sentence for each configuration field of `needs` that has another value."""
        config, name = getattr(self.model, "config", None), type(self.model).__name__
        return [
            f"{name} with {field}={getattr(config, field)!r} cannot be sharded; use {field}={value!r}"
            for field, value in self.needs.items()
            if getattr(config, field, value) != value
        ]

    def _hidden_states_apart(self) -> list[str]:
        """Return the options that leave a model of `reads_hidden_states` parts of these."""
        name, config = type(self.model).__name__, self.shard_config
        if name not in self.reads_hidden_states:
            return []
        lie_apart = config.stage_manager.num_stages > 1 and not (self.stages is not None and self.stages.kept_outputs)
        cut_by = (
            ("enable_sequence_parallelism=True", config.sequence, "enable_sequence_parallelism=False"),
            ("cp_size above 1", config.context, "cp_size=1"),
        )
        problems = [f"{name} reads hidden states that lie on several pipeline stages; use pp_size=1"] * lie_apart
        return problems + [
            f"{option} leaves {name} parts of the hidden states that it reads; use {way_out}"
            for option, axis, way_out in cut_by
            if axis is not None
        ]

    @classmethod
    def _may_cut_sequence(cls) -> bool:
        """Return `supports_sequence_parallel`, unless a subclass of the class that sets it has another table."""
        for each in cls.__mro__:
            if "supports_sequence_parallel" in vars(each):
                return each.supports_sequence_parallel
            if "module_policy" in vars(each):
                return False
        return False

    def exchanges_heads(self) -> bool:
        """Return whether the layers can have parts of sequences between attentions that exchange them for heads."""
        return self.supports_ulysses and self._may_cut_sequence()

    def heads_of(self, owner: nn.Module, name: str, features: int) -> int | None:
        """Return the number of heads of a projection to or from `features`; None if nothing tells of any."""
        return None

    def preprocess(self) -> nn.Module:
        """Prepare the model before any replacement, and return it."""
        return self.model

    @abstractmethod
    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table: module class -> description of the changes to its modules."""

    def entries(self) -> Mapping[str, PlanEntry]:
        """Return what is said about each part that the table names, by its path in a model of the table's key."""
        table = {key if isinstance(key, str) else key.__name__: each for key, each in self.module_policy().items()}
        return {
            join(key, part.suffix): PlanEntry(getattr(part.target_module, "__name__", "replicate"), self.origin)
            for key, description in table.items()
            for part in description.sub_module_replacement
        }

    def postprocess(self) -> nn.Module:
        """Finish the model after all replacements, and return it."""
        return self.model


def description_of(
    table: Mapping[str, ModulePolicyDescription], path: str, module: nn.Module
) -> ModulePolicyDescription | None:
    """Return what a table by class names, or by paths as of a lowered plan, says about `path`, or None."""
    names = (path, *(cls.__name__ for cls in type(module).__mro__))
    return next((table[name] for name in names if name in table), None)
