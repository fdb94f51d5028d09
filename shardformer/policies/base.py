"""Policy: the description of how a family is sharded. `ModelSharder` does what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardformer.context_parallel.zigzag import Positions
from shardformer.layers.parallel_module import ParallelModule
from shardformer.shard_config import ShardConfig
from shardformer.stages.stage import StageLayout
from shardformer.utils.phrases import divisors_phrase


@dataclass
class SubModuleReplacementDescription:
    """One sub-module to replace.

    Attributes:
        suffix: path of the sub-module below the module that the description is for.
        target_module: the class whose `from_native_module` makes the replacement; None declares the sub-module
            replicated: it stays, and every rank computes the same with it.
        kwargs: further arguments of `from_native_module`.
        ignore_if_not_exist: whether the sub-module may be missing (a cross-attention, a gate).
        reads: name of the input; column-parallel sub-modules that read the same one share an all-reduce.
        partial_gradient: the parameters stay whole but see a part of the tokens or heads of each rank, so their
            gradients are summed over the axis.
        gathers_sequence: under sequence parallelism its input is gathered: it starts a tensor-parallel region.
    """

    suffix: str
    target_module: type[ParallelModule] | None
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False
    reads: str | None = None
    partial_gradient: bool = False
    gathers_sequence: bool = False


@dataclass
class ModulePolicyDescription:
    """What changes in each module of one class.

    Attributes:
        attribute_replacement: attribute name -> value on this rank.
        param_replacement: functions that change the module's own parameters in place.
        sub_module_replacement: the sub-modules to replace.
        method_replacement: method name -> function, bound to the module.
        fusions: functions that fuse operators of the module in place, once its sub-modules are replaced.
        gathers_sequence: under sequence parallelism the module's input is gathered: it starts a tensor-parallel region.
    """

    attribute_replacement: dict[str, Any] = field(default_factory=dict)
    param_replacement: list[Callable[[nn.Module], None]] = field(default_factory=list)
    sub_module_replacement: list[SubModuleReplacementDescription] = field(default_factory=list)
    method_replacement: dict[str, Callable] = field(default_factory=dict)
    gathers_sequence: bool = False
    fusions: list[Callable[[nn.Module], None]] = field(default_factory=list)


class Policy(ABC):
    """How one family is sharded.

    A subclass gives `module_policy` (keys are class names or classes of the model's modules) and, for pipelines,
    `stages`. `set_model` and `set_shard_config` are called first, so that a table can read sizes.

    Attributes:
        family: of transformers, `transformers.models.<family>.modeling_<family>`; None for a policy of another model.
        module: where the family's classes are, if not there.
        prefix: of the names of the family's classes.
        heads: what follows the prefix in the names of the model classes that the policy is for.
        stages: where the family may be cut into pipeline stages; None where it may not.
        supports_sequence_parallel: whether the table says where tensor-parallel regions start and what lies between
            them, so that the sequence can be cut there. Said by the class that has the table, or one derived from it.
        writes_usual_losses: whether the heads that write their loss out compute that of others with their suffix. Said
            by the class that names the heads; otherwise the loss is the one that their forward returns.
        splits_towers: whether that also goes for several lists of layers, one after the other.
        supports_ulysses: whether ranks may exchange the sequence for heads around its attention (all-to-all).
        repeats_layers: whether a layer may run several times, so that pipeline stages share its parameters.
        uneven_heads: whether ranks may have different numbers of heads, because the attention follows its weights.
        replicate_unlisted: whether modules that the table does not name are replicated, in the place of an error.
        cuts_attention: whether ranks attend with heads of their own.
    """

    family: str | None = None
    module: str = ""
    prefix: str = ""
    heads: tuple[str, ...] = ()
    stages: StageLayout | None = None
    supports_sequence_parallel = False
    writes_usual_losses = False
    splits_towers = False
    supports_ulysses = True
    repeats_layers = False
    uneven_heads = False
    replicate_unlisted = False
    cuts_attention = True

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.shard_config = ShardConfig()

    def set_model(self, model: nn.Module) -> None:
        """Let the policy read the model's attributes."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Let the policy read what is asked for."""
        self.shard_config = shard_config

    @property
    def tp_size(self) -> int:
        """Ranks that share the weights of a layer."""
        return 1 if self.shard_config.uses_ulysses else self.shard_config.tensor_parallel_size

    @property
    def base_path(self) -> str:
        """Path of the base model (the one with the layers) inside the model; "" when the model is it."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix and hasattr(self.model, prefix) else ""

    def tokens_mix_only_in_attention(self) -> bool:
        """Whether tokens of different places meet in attention and nowhere else."""
        return True

    def position_counter(self) -> Positions:
        """How the base model counts positions where it is given none; asked for before the model is cut."""
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
        """Config attribute -> number of heads that the axis has to divide, `num_attention_heads` first."""
        config = self.model.config
        return {"num_attention_heads": config.num_attention_heads}

    def check(self) -> list[str]:
        """Sentences on what keeps this model from being sharded as asked; empty when nothing does."""
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
        size = self.shard_config.tensor_parallel_size
        is_uneven = self.uneven_heads and not self.shard_config.uses_ulysses
        return problems + [
            f"tp_size={size} does not divide {name}={count}; use {divisors_phrase(count)}"
            for name, count in self.head_counts().items()
            if count % size and not (is_uneven and count >= size)
        ]

    @classmethod
    def _may_cut_sequence(cls) -> bool:
        """Whether the class says so, and no class that is derived from that one has another table."""
        for each in cls.__mro__:
            if "supports_sequence_parallel" in vars(each):
                return each.supports_sequence_parallel
            if "module_policy" in vars(each):
                return False
        return False

    def check_hidden_states(self, classes: Collection[str]) -> list[str]:
        """Sentences for a model of one of `classes`, whose head reads the hidden states of all layers."""
        name, problems = type(self.model).__name__, []
        if name in classes and self.shard_config.stage_manager.num_stages > 1:
            problems.append(f"{name} reads hidden states that lie on several pipeline stages; use pp_size=1")
        if name in classes and self.shard_config.sequence is not None:
            problems.append(
                f"enable_sequence_parallelism=True leaves {name} parts of the hidden states that it reads; "
                "use enable_sequence_parallelism=False"
            )
        return problems

    def preprocess(self) -> nn.Module:
        """Work on the model before anything is replaced; returns the model."""
        return self.model

    @abstractmethod
    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """The table: class of module -> what changes in it."""

    def postprocess(self) -> nn.Module:
        """Work on the model after everything is replaced; returns the model."""
        return self.model
