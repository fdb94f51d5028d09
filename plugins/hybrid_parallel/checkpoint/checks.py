"""What a checkpoint cannot hold, and what does not fit the model and the optimizer that load it; each one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from booster.errors import ConfigurationError
from shardformer.distributed.process_groups import all_gather_json
from shardformer.peft import adapter_configs, kind_of
from shardformer.peft.kinds import LAYER_KINDS, is_adapter_part

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer

# Options that torch's schedulers add to the groups of any optimizer, which may be loaded before its scheduler is made.
_OF_SCHEDULERS = frozenset({"initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})


def check_size(path: Path, expected: int) -> None:
    """Refuse a file of a checkpoint that is missing, or has another number of bytes than its manifest says."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing; load another checkpoint")
    if path.stat().st_size != expected:
        raise ConfigurationError(
            f"{path} has {path.stat().st_size} bytes instead of {expected}; load another checkpoint"
        )


def check_optimizer_state(optimizer: HybridParallelOptimizer, saved: Mapping[str, Any] | None) -> None:
    """Check that a saved state belongs to this kind of optimizer, before anything is changed."""
    if saved is None:
        raise ConfigurationError("the checkpoint was saved without an optimizer; load it without one")
    own = type(optimizer.unwrap()).__name__
    if saved["class"] != own:
        raise ConfigurationError(
            f"the checkpoint holds the state of {saved['class']}, not of {own}; make a {saved['class']}"
        )
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ConfigurationError(
            f"the checkpoint holds {len(saved['param_groups'])} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}; make it with the same groups"
        )
    for index, (group, options) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        unknown = options.keys() - group.keys() - optimizer.defaults.keys() - _OF_SCHEDULERS
        if unknown:
            raise ConfigurationError(
                f"group {index} of the checkpoint has the option {min(unknown)!r}, which this {own} does not know; "
                "make the optimizer as it was made"
            )
    if "group_names" in saved:
        _check_ties(ties_of(optimizer), saved["tied"])
        _check_groups(optimizer, saved["group_names"])


def ties_of(optimizer: HybridParallelOptimizer) -> list[list[str]]:
    """Return the names of each tied parameter of the whole model."""
    return sorted({tuple(sorted((name, *others))) for name, others in optimizer.aliases.items() if others})


def _check_ties(own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> None:
    own, saved = set(map(tuple, own)), set(map(tuple, saved))
    for names in sorted(own ^ saved):
        has, lacks = ("this model", "the checkpoint") if names in own else ("the checkpoint", "this model")
        raise ConfigurationError(
            f"{has} ties {' and '.join(names)}, and {lacks} does not; tie the weights as they were, or load the "
            "checkpoint without the optimizer"
        )


def _check_groups(optimizer: HybridParallelOptimizer, saved: Sequence[Sequence[str]]) -> None:
    """Refuse parameters that are in another group than they were: they would take its options."""

    def group_of(groups: Sequence[Sequence[str]]) -> dict[str, int]:
        aliases = optimizer.aliases
        return {min((name, *aliases.get(name, ()))): index for index, names in enumerate(groups) for name in names}

    here, there = group_of(optimizer.group_names), group_of(saved)
    for name in (*there, *here):
        if here.get(name) != there.get(name):
            before, now = (f"group {found[name]}" if name in found else "no group" for found in (there, here))
            raise ConfigurationError(
                f"{name} is in {before} of the checkpoint's optimizer and in {now} of this one; make the groups "
                "as they were"
            )


def check_plain(optimizer: HybridParallelOptimizer, key: str, value: Any) -> None:
    """Refuse a state that is neither a tensor nor a number, such as the history of LBFGS."""
    if not isinstance(value, int | float | str):
        raise ConfigurationError(
            f"a checkpoint cannot hold the state {key!r} of {type(optimizer.unwrap()).__name__}, a "
            f"{type(value).__name__}; save the model without the optimizer, or optimizer.state_dict() by torch.save"
        )


def refuse_bare_adapters(module: nn.Module) -> None:
    """Refuse adapters without a peft wrapper, as made by transformers' `add_adapter`: they have no file format here."""
    if adapter_configs(module):
        raise ConfigurationError(
            f"the adapters of this {type(module).__name__} were made by model.add_adapter, which save_model and "
            "load_model do not know; wrap the model by peft's get_peft_model before boost()"
        )


def check_adapters(model: HybridParallelModel) -> None:
    """Refuse, on all ranks, adapters that are gone, that `boost` has not seen, or whose name is no folder's."""
    peft_model = model.unwrap()
    # A pipeline stage may hold no adapter modules, so gather from all ranks.
    if not any(all_gather_json(any(is_adapter_part(each) for each in peft_model.modules()))):
        raise ConfigurationError(
            "the model has no adapters: merge_and_unload or unload removed them; save the adapter first, and merge "
            "it into the whole model, by PeftModel.from_pretrained(base, directory).merge_and_unload()"
        )
    for adapter, config in peft_model.peft_config.items():
        if Path(adapter).name != adapter:
            raise ConfigurationError(f"the adapter '{adapter}' cannot be a folder's name; use for example 'default'")
        if adapter not in model.origin.adapter_names and kind_of(config) in LAYER_KINDS:
            raise ConfigurationError(f"the adapter '{adapter}' was added after boost(); add it before")
