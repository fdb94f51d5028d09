"""ShardFormer and the one-call ShardModel; ModelSharder, which applies a policy; `resolve`, which tells how it cuts.

Which policy comes first: a policy, a TPInfo, slots or a derived plan that the user gives; `sharding_dim`; and what
`registry` finds for the model's class. All of them end in one table that `ModelSharder` applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.attention import log_once
from shardformer.attention.packed_documents import keep_documents_apart
from shardformer.distributed.blocks import blocks_of
from shardformer.distributed.sequence_parallel import SequenceParallel, gather_on_entry
from shardformer.generation import generate_in_step
from shardformer.layers import FusedLayerNorm, FusedRMSNorm, SharedInput
from shardformer.layers.experts import run_whole_experts, shard_experts
from shardformer.layers.parallel_module import ParallelModule, sum_partial_gradients
from shardformer.peft import adapters_detached, keep_whole, model_inside, prompts_followed, prompts_on_stages
from shardformer.policies.backbone import BackbonePolicy
from shardformer.policies.base import (
    ModulePolicyDescription,
    Origin,
    PlanEntry,
    Policy,
    SubModuleReplacementDescription,
    description_of,
)
from shardformer.policies.plans.propose import ProposedPolicy
from shardformer.policies.registry import keep_head_losses, policy_for
from shardformer.policies.user_policy import SlotPolicyAdapter, TPInfoPolicy, UniformPolicy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import annotate
from shardformer.stages.stage import StagePartitioner, StagePlaceholder
from shardformer.transforms import layout_checks, sequences
from shardformer.transforms.operator_fusion import fuse_norms, fuse_operators
from shardformer.transforms.sequences import divide_layers, leave_between_layers, route_attention
from shardformer.utils.derived_modules import carry_over, change_module
from shardformer.utils.freed_memory import return_freed_memory
from shardformer.utils.module_paths import alias_groups, has_module, replace_module, retie

SharedParameters = list[dict[int, Tensor]]


class ModelSharder:
    """Shards one model in place.

    Args:
        policy: how the model family is sharded; None looks the policy up by the model's class.

    Raises:
        ValueError: no policy is known.
    """

    def __init__(self, model: nn.Module, shard_config: ShardConfig, policy: Policy | None = None) -> None:
        self.model = model
        self.config = shard_config
        self.policy = policy_of(model, shard_config, policy)
        self._is_users_policy = policy is not None
        self.policy.set_model(model)
        self.policy.set_shard_config(shard_config)
        if shard_config.enable_all_optimization and layout_checks.sequence_problems(self):
            # The option enables what the family supports, which here excludes sequence parallelism.
            self.config = shard_config.without_sequence()
            self.policy.set_shard_config(self.config)

    def shard(self) -> SharedParameters:
        """Shard the model.

        Returns:
            The parameters shared by several pipeline stages (stage -> parameter), in the same order on every rank.
            Entries of stages that this rank does not hold are meta tensors.

        Raises:
            ValueError: the model cannot be sharded as requested; the message lists all reasons.
        """
        self.policy.preprocess()
        layout_checks.check_policy(self)
        groups = alias_groups(self.model)
        tied = [names for names in groups if len(names) > 1]
        shared = self._names_on_several_stages(groups)
        shares = self.config.context is not None and self.layer_sequence is None
        positions = self.policy.position_counter() if shares else None
        has_mixers = sequences.can_run_by_document(self.model, self.policy)
        hides_documents = sequences.can_hide_documents(self.model, self.policy)
        if self.cut is not None:
            self.cut.apply()
            self._tell_blocks()
        self.replace_module()
        if self._is_users_policy:
            keep_head_losses(self.model, self.policy)
        if positions is not None:
            sequences.share_sequences(self.model, self.policy, self.config, positions)
        if self.layer_sequence is not None:
            self._divide_layers(self.layer_sequence, by_exchange=True)
            self.model.sequence_is_cut = True
        if has_mixers:
            keep_documents_apart(self.model, [layer for held in self._held_layers() for layer in held])
        if hides_documents:
            sequences.hide_other_documents(self.model)
        shard_experts(self.model, self.config)
        if self.config.expert_parallel_size == 1 and blocks_of(self.config.group) is None:
            run_whole_experts(self.model)  # in blocks, bits are those of the native forward
        retie(self.model, tied)
        self._annotate_the_rest()
        self.policy.postprocess()
        return self._shared_parameters(shared)

    def _tell_blocks(self) -> None:
        received = self.model.stage_views.stage_input
        received.blocks = blocks_of(self.config.group) if self.config.tensor_parallel_size > 1 else None
        received.head_inputs = {name for each in self.policy.stages.chain for name in each.head_inputs}

    def replace_module(self) -> None:
        """Replace sub-modules and attributes as the policy's table specifies."""
        fusions = 0
        self.kept.tell(type(self.model).__name__)
        for _, module, description in self.described():
            self._apply(module, description)
            fusions += len(description.fusions)
        if self.config.enable_fused_normalization and not self.policy.names_norms:
            fuse_norms(self.model)
        if self.config.enable_jit_fused:
            fusions += fuse_operators(self.model, self._device.type)
        self._tell_what_stays(fusions)
        exchanged = self.config.sequence if self.config.uses_ulysses else self.layer_sequence
        route_attention(self.model, self.policy, self.config, self._held_layers, exchanged, self._device)
        if self.config.sequence is not None:
            self._divide_layers(self.config.sequence, self.config.uses_ulysses)
            self.model.sequence_is_cut = self.config.cuts_sequence
            self.model.heads_are_exchanged = self.config.uses_ulysses

    def _divide_layers(self, region: SequenceParallel, by_exchange: bool) -> None:
        divide_layers(self.model, self._held_layers(), region, by_exchange)
        names, held = self.policy.stages.inputs_between, self._held_layers()
        if names:
            runner, layers = (
                sequences.runner_of(self.model, self.policy),
                sequences.layers_of(self.model, self.policy),
            )
            leave_between_layers(runner, names, layers, held, region)

    def _tell_what_stays(self, fusions: int) -> None:
        """Log the options that have no effect on this model, so that they are not ignored silently."""
        name = type(self.model).__name__
        if self.config.enable_jit_fused and not fusions:
            worth = " with a gain on a GPU" if self._device.type == "cuda" else ""
            log_once(name, f"keeps its own operators: its forwards have none of those that can be fused{worth}")
        fused = any(isinstance(module, FusedLayerNorm | FusedRMSNorm) for module in self.model.modules())
        if self.config.enable_fused_normalization and not fused:
            log_once(name, "keeps its own norms: its policy names none to fuse")

    @property
    def _device(self) -> torch.device:
        """The device that the model will run on."""
        return self.config.device_of(next(self.model.parameters(), torch.empty(0)))

    @cached_property
    def layer_sequence(self) -> layout_checks.LayerSequence | None:
        """What context-parallel ranks share, if it is not the inputs. First accessed before the model is changed."""
        context = self.config.context
        if context is None or sequences.reason_against_sharing(self.model, self.policy) is None:
            return None
        return layout_checks.LayerSequence(context.group)

    @cached_property
    def cut(self) -> StagePartitioner | None:
        """The pipeline partitioner; None without a pipeline. First accessed before the model is changed."""
        if self.config.stage_manager.num_stages == 1:
            return None
        return StagePartitioner(self.model, self.policy.base_path, self.policy.stages, self.config.stage_manager)

    @cached_property
    def table(self) -> Mapping[str, ModulePolicyDescription]:
        """The policy's table, by class names."""
        table = self.policy.module_policy()
        return {key if isinstance(key, str) else key.__name__: description for key, description in table.items()}

    def described(self) -> Iterator[tuple[str, nn.Module, ModulePolicyDescription]]:
        """Yield the modules that the table describes: path, module, description."""
        for path, module in list(self.model.named_modules()):
            if isinstance(module, StagePlaceholder):
                continue
            if (description := description_of(self.table, path, module)) is not None:
                yield path, module, description

    def _apply(self, module: nn.Module, description: ModulePolicyDescription) -> None:
        if self.config.tensor_parallel_size > 1:
            for name, value in description.attribute_replacement.items():
                setattr(module, name, value)
        for change in description.param_replacement:
            module = change_module(self.model, module, change)
        for name, function in description.method_replacement.items():
            setattr(module, name, function.__get__(module))
        readers: dict[str, list[nn.Module]] = {}
        for replacement in description.sub_module_replacement:
            native = module.get_submodule(replacement.suffix) if has_module(module, replacement.suffix) else None
            new = None if native is None or isinstance(native, StagePlaceholder) else self._replace(module, replacement)
            if replacement.reads is not None and new is not None:
                readers.setdefault(replacement.reads, []).append(new)
        for layers in readers.values():
            if len(layers) > 1:
                SharedInput(layers)
        for fuse in description.fusions if self.config.enable_jit_fused else ():
            if not any(isinstance(child, StagePlaceholder) for child in module.children()):
                module = change_module(self.model, module, fuse)
        if description.gathers_sequence:
            self._gather_on_entry(module)

    def _gather_on_entry(self, module: nn.Module) -> None:
        if self.config.sequence is not None and not self.config.uses_ulysses:
            gather_on_entry(module, self.config.sequence, self.config.enable_sequence_overlap)

    def _replace(self, module: nn.Module, replacement: SubModuleReplacementDescription) -> nn.Module | None:
        native = module.get_submodule(replacement.suffix)
        target, new, options = self._target_of(replacement), None, replacement.kwargs or {}
        cuts = replacement.target_module is not None and replacement.target_module.shards_layer
        stays_whole = target is None and self.config.uses_ulysses and cuts
        if target is not None and native in self.kept:
            target.keep_whole(native, self.config.group, **options)
        elif target is not None:
            new = target.from_native_module(native, self.config.group, **options)
            carry_over(native, new)
            replace_module(module, replacement.suffix, new)
        if replacement.gathers_sequence:
            self._gather_on_entry(new or native)
        if replacement.partial_gradient or stays_whole:
            for parameter in (new or native).parameters():
                annotate(parameter, self.config.replicated_spec(parameter), self.config.group)
        return new

    def _target_of(self, replacement: SubModuleReplacementDescription) -> type[ParallelModule] | None:
        """Return the class that replaces a sub-module under this configuration; None if the sub-module stays."""
        target = replacement.target_module
        if target is None or (self.config.uses_ulysses and target.shards_layer):
            return None
        return target if self.config.tensor_parallel_size > 1 or not target.needs_axis else None

    @cached_property
    def kept(self) -> layout_checks.KeptLayers:
        """The layers that the user has customized. First accessed before the model is changed."""
        found = [
            layout_checks.Replacement(path, native, target, replacement.kwargs or {})
            for path, native, replacement in self.sub_modules()
            if (target := self._target_of(replacement)) is not None
        ]
        return layout_checks.KeptLayers(found, self.config)

    def sub_modules(self) -> Iterator[tuple[str, nn.Module, SubModuleReplacementDescription]]:
        """Yield the sub-modules that the table names and the model has: path, module, description."""
        for path, module, description in self.described():
            for replacement in description.sub_module_replacement:
                if has_module(module, replacement.suffix):
                    native = module.get_submodule(replacement.suffix)
                    yield f"{path}.{replacement.suffix}".lstrip("."), native, replacement

    def _annotate_the_rest(self) -> None:
        for parameter in self.model.parameters():
            if getattr(parameter, "shard_spec", None) is None:
                annotate(parameter, self.config.replicated_spec(parameter))

    # ----- stages and tied parameters -----

    def _held_layers(self) -> list[list[nn.Module]]:
        """Return the layers that run consecutively on this rank, one list per layer list and stage."""
        is_cut = self.cut is not None
        found = self.cut.held_layers() if is_cut else []
        for part in self.policy.parts[is_cut:]:
            found += [list(part.model.get_submodule(path)) for path in part.layer_lists]
        return found

    def _names_on_several_stages(self, groups: list[list[str]]) -> list[tuple[list[str], list[int]]]:
        """Return parameters (all names of each) held by several stages, and these, before partitioning."""
        if self.cut is None:
            return []
        holders = [(names, sorted(set.union(*map(self.cut.holders, names)))) for names in groups]
        return [(names, stages) for names, stages in holders if len(stages) > 1]

    def _shared_parameters(self, shared: list[tuple[list[str], list[int]]]) -> SharedParameters:
        here = self.config.stage_manager.held
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        result = []
        for names, stages in shared:
            local = next((parameters[name] for name in names if name in parameters), None)
            result.append({stage: local if stage in here else torch.empty(0, device="meta") for stage in stages})
        return result


class ShardFormer:
    """Shards a full model and keeps this rank's part.

    Example:
        ```python
        model, shared_params = ShardFormer(ShardConfig(tensor_parallel_process_group=group)).optimize(model)
        ```

    Args:
        shard_config: the sharding options.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, SharedParameters]:
        """Shard `model` in place.

        Args:
            model: the full model, identical on every rank; it may be wrapped by peft.
            policy: how the model family is sharded; None looks the policy up by the model's class.

        Returns:
            The model, and the parameters shared by several pipeline stages (stage -> parameter).

        Raises:
            ValueError: no policy is known, or the model cannot be sharded as requested. The model is then unchanged.
        """
        shared_params = self._shard(model, policy)
        return_freed_memory()  # of whole layers, which nothing refers to any more
        return model, shared_params

    def _shard(self, model: nn.Module, policy: Policy | None) -> SharedParameters:
        inside = model_inside(model)
        sharder = ModelSharder(inside, self.shard_config, policy)
        config, policy = sharder.config, sharder.policy
        with prompts_followed(model, config, policy), adapters_detached(inside, config, policy):
            shared_params = sharder.shard()
        keep_whole(model.parameters(), config)
        shared_params += prompts_on_stages(model, self.shard_config.stage_manager)
        if hasattr(inside, "generate"):
            generate_in_step(inside, config)
        if self.shard_config.inference_only:
            model.eval().requires_grad_(False)
        sum_partial_gradients(model)
        return shared_params


class ShardModel:
    """Shards `model` in place across tensor-parallel ranks.

    Example:
        ```python
        model = ShardModel(model, MyPolicy).model
        ```

    Args:
        model: the full model, identical on every rank.
        policy: a slot policy class (`argument_policy`, `attn_in`, ...), a `Policy`, or None for the family's policy.
        process_group: the tensor-parallel process group; None for all ranks.
        options: further options of `ShardConfig`.

    Attributes:
        model: the sharded model.

    Raises:
        ValueError: no policy is known, or the model cannot be sharded as requested. The model is then unchanged.
        TypeError: `policy` does not describe a policy.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: type | Policy | None = None,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        config = ShardConfig(tensor_parallel_process_group=process_group, **options)
        self.model, self.shared_params = ShardFormer(config).optimize(model, as_policy(policy))


def adapt_whole(model: nn.Module) -> None:
    """Adapt layers that are whole on each rank: packed documents stay apart, and experts make fewer passes."""
    sequences.separate_documents(model)
    run_whole_experts(model)


def as_policy(policy: type | Policy | None) -> Policy | None:
    """Convert a policy, its class or a slot policy class to a `Policy`; None stays; TypeError for others."""
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and hasattr(policy, "argument_policy"):
        return SlotPolicyAdapter(policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy()
    raise TypeError(f"{policy!r} is not a policy; use a Policy, or a class with argument_policy")


@dataclass(frozen=True)
class ResolvedPlan:
    """How a model is cut under some options."""

    origin: Origin
    # part of the model -> its style, and who says so. A part is a path with `*` for numbers, or one below the class of
    # its module; parts that no entry names are whole on every rank.
    entries: Mapping[str, PlanEntry]

    def __str__(self) -> str:
        width = max(map(len, self.entries), default=0)
        return "\n".join(f"{path:{width}}  {it.style}: {it.origin.value}" for path, it in self.entries.items())


def resolve(model: nn.Module, shard_config: ShardConfig | None = None, policy: Policy | None = None) -> ResolvedPlan:
    """Return how an unchanged model is cut; `policy`: the user's; None: by class; ValueError if unknown."""
    config = shard_config or ShardConfig()
    found = policy_of(model, config, policy)
    found.set_model(model)
    found.set_shard_config(config)
    return ResolvedPlan(found.origin, found.entries())


def policy_of(model: nn.Module, config: ShardConfig, given: Policy | None) -> Policy:
    """Return the user's policy, in part if it leaves backbones to theirs, or the family's; ValueError if unknown."""
    is_ordered = isinstance(given, ProposedPolicy) and given.declared.execution
    if isinstance(given, TPInfoPolicy | SlotPolicyAdapter | ProposedPolicy) and not is_ordered:
        with suppress(ValueError):
            found = policy_for(model)
            return BackbonePolicy(policy_for, given) if isinstance(found, BackbonePolicy) else given
    if given is not None:
        return given
    return policy_for(model) if config.sharding_dim is None else UniformPolicy(config.sharding_dim)
