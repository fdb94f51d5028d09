"""Split-gather sequence parallelism (arXiv 2205.05198, section 4.2) for models that are sharded by a plan.

A layer is a sequence of tensor-parallel regions; between regions every rank holds a slice of the sequence. A region of
column- and row-parallel linears gathers the input of its columns and reduce-scatters the output of its row, also if
they are in different modules, as in BERT's layers. Any other sharded module (experts, latent attention, indexers) runs
on the full sequence, as without sequence parallelism, and its output is sliced again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from shardformer.attention import log_once, uses_registry
from shardformer.distributed.blocks import rank_of_draws
from shardformer.distributed.random import draw_per_rank
from shardformer.distributed.sequence_parallel import SequenceParallel, run_whole
from shardformer.layers import ColumnParallelLinear, ParallelDropout, RowParallelLinear
from shardformer.layers.linear import in_features, out_features
from shardformer.matmul.native import is_linear
from shardformer.policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.feature_counts import attends, drops_by_function, is_attention, names_read
from shardformer.policies.rules import ShardingRules
from shardformer.shard_config import ShardConfig
from shardformer.stages.stage import StageLayout

Table = dict[str, ModulePolicyDescription]
Change = SubModuleReplacementDescription

# Paths of attention over other states than those of its layer, and names of its projections of these.
_CROSS = re.compile(r"(?i)cross|encoder_attn|enc_?dec_?att|encoder_decoder_att|encoder_attention")
_POSITIONS = {"object_queries"} | {
    f"{kind}_position_embeddings" for kind in ("query", "key_value", "encoder", "spatial")
}
_OF_OTHER_STATES = re.compile(r"(?i)(.*[._])?(k|v|kv|key|value)(_\w+)?")


@dataclass
class _Division:
    """How one layer is divided."""

    # paths of the modules whose children are columns or rows of tensor-parallel regions
    owners: list[str] = field(default_factory=list)
    # (path, name of a child) of what sees a slice of the sequence, or stands inside of a region
    between: list[tuple[str, str]] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)  # names of the parts of the layer that run on full sequences
    problems: list[str] = field(default_factory=list)  # paths of sharded modules that can be in neither


def add_sequence_regions(table: Table, model: nn.Module, stages: StageLayout, config: ShardConfig) -> None:
    """Add the changes for split-gather to the table of a plan; lists that cannot be divided see whole sequences."""
    divisible = divisible_lists(table, model, stages)
    for layers in (each.layers for each in stages.chain):
        if layers not in divisible:
            log_once(type(model).__name__, f"keeps sequences whole in the layers of {layers!r}")
        for index in range(len(model.get_submodule(layers))):
            if layers in divisible:
                _add_regions_of_layer(table, model, f"{layers}.{index}", config)
            else:
                kept = table.setdefault(f"{layers}.{index}", ModulePolicyDescription())
                kept.attribute_replacement["sees_whole_sequences"] = True


def divisible_lists(table: Table, model: nn.Module, stages: StageLayout | None) -> list[str]:
    """Return the paths of the lists of layers that can process slices of a sequence.

    A detector with an auxiliary loss stacks the outputs of its layers, of which the last one alone is made whole.
    """
    if getattr(getattr(model, "config", None), "auxiliary_loss", False):
        return []
    paths = [] if stages is None else [each.layers for each in stages.chain]
    return [path for path in paths if _can_be_divided(table, model, path)]


def _can_be_divided(table: Table, model: nn.Module, layers: str) -> bool:
    """Return whether layers have regions or attention, and no sharded module that can be in neither kind of part."""
    modules = list(model.get_submodule(layers))
    found = [_divide(table, model, f"{layers}.{index}") for index in range(len(modules))]
    has_tokens = any(each.owners for each in found) or any(attends(part) for each in modules for part in each.modules())
    return has_tokens and not any(each.problems for each in found)


def _add_regions_of_layer(table: Table, model: nn.Module, path: str, config: ShardConfig) -> None:
    found = _divide(table, model, path)
    described = table.setdefault(path, ModulePolicyDescription())
    described.param_replacement += own_parameters_per_token(model.get_submodule(path), config)
    described.param_replacement += [partial(_run_whole, name=name, region=config.sequence) for name in found.whole]
    for owner, name in found.between:
        changes = table.setdefault(owner, ModulePolicyDescription()).sub_module_replacement
        changes += per_token(name, model.get_submodule(owner).get_submodule(name), config)
    for owner in found.owners:
        _gather_and_scatter(table[owner], owner, path, config.sequence)
    # Each rank has its own tokens, heads or features. Parts that run whole draw the same numbers on all ranks, so a
    # layer around one that draws does so too: the masks of its slices are the same.
    draws_alike = any(_draws(model.get_submodule(f"{path}.{name}")) for name in found.whole)
    for owner in {path, *found.owners}:
        if drops_by_function(model.get_submodule(owner)) and not (owner == path and draws_alike):
            table[owner].param_replacement.append(partial(_draw_per_rank, config=config))


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


def _divide(table: Table, model: nn.Module, path: str) -> _Division:
    """Find the regions of the layer at `path`, and what is between them."""
    layer, found = model.get_submodule(path), _Division()
    own = table[path].sub_module_replacement if path in table else []
    if own:
        found.owners.append(path)
        found.problems += [f"{path}.{change.suffix}" for change in own if not _is_in_region(layer, change)]
    for name, child in _parts(layer):
        at = f"{path}.{name}"
        inside = _below(table, at)
        if name in {change.suffix for change in own}:
            continue
        between = _between(model, inside, at)
        if not inside and all(parameter.dim() <= 1 for parameter in child.parameters()):  # a norm, an activation
            found.between.append((path, name))
        elif inside and between is not None:
            found.owners += inside
            found.between += between
        else:
            found.whole.append(name)
            found.problems += [] if _is_closed(inside) else [at]
    columns, rows = _widths(table, model, found.owners, path)
    if found.owners and (columns != rows or len(columns) != 1):
        found.problems.append(path)
    return found


def _between(model: nn.Module, inside: Table, path: str) -> list[tuple[str, str]] | None:
    """Return what the module at `path` has between its columns and rows; None if it has other sharded parts."""
    for at, description in inside.items():
        owner = model.get_submodule(at)
        if any(True for _ in owner.parameters(recurse=False)):
            return None
        changes = description.sub_module_replacement
        if not all(_is_in_region(owner, change) for change in changes) or (changes and _adds_positions(owner)):
            return None
    found: list[tuple[str, str]] = []
    todo = [path]
    while todo:
        at = todo.pop()
        changes = inside[at].sub_module_replacement if at in inside else []
        if not changes and is_attention(model.get_submodule(at)):
            return None  # it reads shapes before its columns, which are in modules of their own
        has_columns = any(change.target_module is ColumnParallelLinear for change in changes)
        for name, child in model.get_submodule(at).named_children():
            if name in {change.suffix for change in changes}:
                continue
            if _below(inside, f"{at}.{name}"):
                todo.append(f"{at}.{name}")
            elif any(parameter.dim() > 1 or has_columns for parameter in child.parameters()):
                return None  # it mixes features of a token, or sees those of the region
            else:
                found.append((at, name))
    return found


def _is_in_region(owner: nn.Module, change: Change) -> bool:
    """Return whether a change makes a column or a row of a region, or belongs to its inside."""
    options, module = change.kwargs or {}, owner.get_submodule(change.suffix)
    if change.target_module not in (ColumnParallelLinear, RowParallelLinear):
        return change.partial_gradient or change.target_module is ParallelDropout
    is_whole = options.get("gather_output") or options.get("splits_input")
    return is_linear(module) and not is_whole


def _adds_positions(attention: nn.Module) -> bool:
    """Return whether an attention adds positions to its columns' input, as DETR's; regions would sum them."""
    names = set(inspect.signature(attention.forward).parameters)
    is_rotary = any("rot" in name for name in names_read(attention))
    return bool(names & _POSITIONS) or ("position_embeddings" in names and not is_rotary)


def _is_closed(inside: Table) -> bool:
    """Return whether a part that runs whole returns the same on all ranks: it has no columns, or rows after them."""
    targets = [each for description in inside.values() for each in description.sub_module_replacement]
    columns = [
        each
        for each in targets
        if each.target_module is ColumnParallelLinear and not (each.kwargs or {}).get("gather_output")
    ]
    return not columns or any(each.target_module is RowParallelLinear for each in targets)


def _widths(table: Table, model: nn.Module, owners: list[str], path: str) -> tuple[set[int], set[int]]:
    """Return the numbers of features that columns read and that rows write."""
    columns, rows = set(), set()
    for at in owners:
        owner = model.get_submodule(at)
        for change in table[at].sub_module_replacement:
            module = owner.get_submodule(change.suffix)
            if change.target_module is ColumnParallelLinear and not _reads_whole(at, path, change):
                columns.add(in_features(module))
            elif change.target_module is RowParallelLinear:
                rows.add(out_features(module))
    return columns, rows


def _draws(module: nn.Module) -> bool:
    """Return whether a part of a layer may draw random numbers."""
    return any(
        isinstance(each, nn.Dropout) or uses_registry(each) or drops_by_function(each) for each in module.modules()
    )


def _reads_whole(owner: str, path: str, change: Change) -> bool:
    """Return whether a column reads the states of another stack of layers, which are not sliced."""
    is_cross = _CROSS.search(owner.removeprefix(path)) is not None
    return is_cross and _OF_OTHER_STATES.fullmatch(change.suffix) is not None


def _gather_and_scatter(description: ModulePolicyDescription, owner: str, path: str, region: SequenceParallel) -> None:
    columns = [each for each in description.sub_module_replacement if each.target_module is ColumnParallelLinear]
    description.gathers_sequence = bool(columns) and owner != path
    for change in columns:
        change.gathers_sequence = owner == path
        is_gathered = region.sums_gradients and not _reads_whole(owner, path, change)
        change.kwargs = {**(change.kwargs or {}), "input_is_gathered": is_gathered}
    for change in description.sub_module_replacement:
        if change.target_module is RowParallelLinear:
            change.kwargs = {**(change.kwargs or {}), "sequence": region}


def _draw_per_rank(module: nn.Module, config: ShardConfig) -> nn.Module:
    return draw_per_rank(module, rank_of_draws(config.group))


def _below(table: Table, path: str) -> Table:
    return {each: value for each, value in table.items() if each == path or each.startswith(f"{path}.")}


def _parts(layer: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a layer by path; a module list is replaced by its elements."""
    for name, child in layer.named_children():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _run_whole(layer: nn.Module, name: str, region: SequenceParallel) -> None:
    run_whole(layer.get_submodule(name), region)
