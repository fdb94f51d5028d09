"""Expert parallelism: find the modules that hold experts, and shard them.

transformers 5 stacks the experts of a layer in parameters [experts, ...] of one module, whose forward takes hidden
states [tokens, hidden], experts [tokens, k] and weights [tokens, k]. Any family with such a module can be sharded: a
rank holds an equal share of the experts, and tokens are sent to them (`token_dispatcher.py`). Tensor parallelism does
not shard these modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.expert_parallel.token_dispatcher import ExpertCapacity, TokenDispatcher
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import EXPERTS, Part, ShardSpec, annotate, shard_parameter
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.phrases import divisors_phrase

INDICES = ("top_k_index", "router_indices")
_WEIGHTS = ("top_k_weights", "routing_weights")


def is_experts(module: nn.Module) -> bool:
    """Return whether the module holds stacked experts that are called with tokens, choices and weights."""
    count = getattr(module, "num_experts", None)
    stacked = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(count, int) or not any(each.dim() == 3 for each in stacked):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    is_called_so = len(names) == 3 and names[1] in INDICES and names[2] in _WEIGHTS
    return is_called_so and all(each.dim() > 0 and each.shape[0] == count for each in stacked)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return path and module of the experts of every layer."""
    return ((path, module) for path, module in model.named_modules() if is_experts(module))


def num_experts(experts: nn.Module) -> int:
    """Return the number of experts of a layer, over all ranks."""
    dispatcher = getattr(experts, "dispatcher", None)
    return experts.num_experts if dispatcher is None else dispatcher.num_experts


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


def shard_experts(model: nn.Module, config: ShardConfig) -> None:
    """Keep this rank's share of the experts, in place, and dispatch tokens to the ranks that hold their experts."""
    size, factor = config.expert_parallel_size, config.expert_capacity_factor
    if size == 1 and factor is None:
        return
    sharded = {}
    for path, experts in list(expert_modules(model)):
        if factor is not None:
            block = model.get_submodule(path.rpartition(".")[0])
            ExpertCapacity(factor, experts.num_experts, skips=size > 1).attach(block, experts)
        if size > 1:
            sharded[experts] = _shard_experts_of(experts, config)
    replace_modules(model, sharded)


class _ShardedExperts(nn.Module):
    """Sends tokens to the ranks of their experts, and runs the native forward, or the object's own, on those here."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        native = self.forward_of_experts or super().forward
        return self.dispatcher(native, hidden_states, top_k_index, top_k_weights)


def _shard_experts_of(experts: nn.Module, config: ShardConfig) -> nn.Module:
    """Shard the parameters of `experts`; return the module that replaces it."""
    group, tp_size, count = config.expert_parallel_process_group, config.tensor_parallel_size, experts.num_experts
    tp_rank = dist.get_rank(config.group) if tp_size > 1 else 0
    place, ranks = dist.get_rank(group) * tp_size + tp_rank, dist.get_world_size(group) * tp_size
    # Each tensor-parallel rank sends different tokens, so each has a partial gradient.
    partial = config.group if tp_size > 1 else None
    for name, parameter in list(experts._parameters.items()):
        if parameter is not None:
            spec = ShardSpec(tuple(parameter.shape), 0, (Part(count),), place, ranks, copies=tp_size, axis=EXPERTS)
            setattr(experts, name, shard_parameter(parameter, spec, partial))
    for child in experts.children():  # a norm after all experts
        for parameter in child.parameters():
            annotate(parameter, ShardSpec(tuple(parameter.shape), rank=tp_rank, world_size=tp_size), partial)
    experts.num_experts = count // dist.get_world_size(group)
    sees_same = tp_size > 1 and not config.uses_ulysses
    new = derive(experts, _ShardedExperts)
    new.forward_of_experts = vars(experts).pop("forward", None)
    new.dispatcher = TokenDispatcher(count, group, config.group if sees_same else None)
    return new
