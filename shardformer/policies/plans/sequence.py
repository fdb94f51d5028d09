"""Split-gather sequence parallelism (arXiv 2205.05198, section 4.2) for models that are sharded by a plan.

A layer is a sequence of tensor-parallel regions; between regions every rank holds a slice of the sequence. A region
made only of column- and row-parallel linears gathers its input and reduce-scatters its output. Any other sharded
module (experts, latent attention, indexers) runs on the full sequence, as without sequence parallelism, and its output
is sliced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from shardformer.layers import ColumnParallelLinear, ParallelDropout, RowParallelLinear
from shardformer.policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.rules import ShardingRules
from shardformer.sequence_parallel.split_gather import SequenceParallel, run_whole
from shardformer.shard_config import ShardConfig

Table = dict[str, ModulePolicyDescription]


def add_sequence_regions(table: Table, model: nn.Module, layers: str, config: ShardConfig) -> None:
    """Add the changes for split-gather in the layers of the list at path `layers` to the table of a plan."""
    for index, layer in enumerate(model.get_submodule(layers)):
        path = f"{layers}.{index}"
        described = table.setdefault(path, ModulePolicyDescription())
        described.param_replacement += own_parameters_per_token(layer, config)
        for name, child in _parts(layer):
            inside = _below(table, f"{path}.{name}")
            if not inside and all(parameter.dim() <= 1 for parameter in child.parameters()):  # a norm, an activation
                described.sub_module_replacement += per_token(name, child, config)
            elif inside and _is_made_of_linears(model, inside):
                for each in inside.values():
                    _gather_and_scatter(each, config.sequence)
            else:
                described.param_replacement.append(partial(_run_whole, name=name, region=config.sequence))


def unclosed_regions(table: Mapping[str, ModulePolicyDescription], layers: str) -> list[str]:
    """Return paths of sharded direct children of a layer, which have no enclosing module that could be a region."""
    return [
        f"{path}.{each.suffix}"
        for path, description in table.items()
        if path.rpartition(".")[0] == layers
        for each in description.sub_module_replacement
    ]


def own_parameters_per_token(layer: nn.Module, config: ShardConfig) -> list[Callable[[nn.Module], None]]:
    """Return changes that declare the gradients of the layer's own parameters partial: they see a sequence slice."""
    return ShardingRules(config).module_parameters(*layer._parameters)


def per_token(name: str, child: nn.Module, config: ShardConfig) -> list[SubModuleReplacementDescription]:
    """Return the changes to a child that sees a slice of the sequence: partial gradients and per-rank dropout."""
    found = []
    if any(True for _ in child.parameters()):
        found.append(SubModuleReplacementDescription(name, None, partial_gradient=config.cuts_sequence))
    for path, module in child.named_modules():
        if type(module) is nn.Dropout:
            found.append(SubModuleReplacementDescription(f"{name}.{path}".rstrip("."), ParallelDropout, {}))
    return found


def _below(table: Table, path: str) -> Table:
    return {each: value for each, value in table.items() if each == path or each.startswith(f"{path}.")}


def _is_made_of_linears(model: nn.Module, inside: Table) -> bool:
    """Return whether one module owns all sharded layers: columns that read its input, and one row layer at its end."""
    if len(inside) != 1:
        return False
    ((path, description),) = inside.items()
    owner, changes = model.get_submodule(path), description.sub_module_replacement
    claimed = {change.suffix for change in changes}
    columns = [owner.get_submodule(each.suffix) for each in changes if each.target_module is ColumnParallelLinear]
    rows = [owner.get_submodule(each.suffix) for each in changes if each.target_module is RowParallelLinear]
    others = [each for each in changes if each.target_module not in (ColumnParallelLinear, RowParallelLinear)]
    linears = all(isinstance(module, nn.Linear) for module in (*columns, *rows))
    return (
        bool(columns)
        and len(rows) == 1
        and linears
        and not description.param_replacement
        and not any(True for _ in owner.parameters(recurse=False))
        and all(each.partial_gradient for each in others)
        and {column.in_features for column in columns} == {rows[0].out_features}
        and all(name in claimed for name, child in owner.named_children() if any(True for _ in child.parameters()))
    )


def _gather_and_scatter(description: ModulePolicyDescription, region: SequenceParallel) -> None:
    description.gathers_sequence = True
    for change in description.sub_module_replacement:
        options: dict[str, Any] = {}
        if change.target_module is ColumnParallelLinear:
            options = {"input_is_gathered": region.sums_gradients}
        elif change.target_module is RowParallelLinear:
            options = {"sequence": region}
        change.kwargs = {**(change.kwargs or {}), **options}


def _parts(layer: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a layer by path; a module list is replaced by its elements."""
    for name, child in layer.named_children():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _run_whole(layer: nn.Module, name: str, region: SequenceParallel) -> None:
    run_whole(layer.get_submodule(name), region)
