"""Inference of the stage layout of a model whose layers lie in several lists that run one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shardformer.policies.plans.stage_inference import num_outputs, placeholder_for, with_parameters
from shardformer.stages.stage import StageLayout


def chain_layout(model: nn.Module, lists: Sequence[str]) -> StageLayout:
    """Build a layout for the layer lists at `lists`, assuming that modules run in registration order.

    A module between two lists runs at the end of the first of them if it is nearer to it in the module tree, and
    before the second otherwise. Another list with as many modules as there are lists has one module for each.
    Poolers, and the modules of a head class outside its base model, run after all lists.
    """
    first: list[dict] = [{} for _ in lists]
    last: list[list[str]] = [[] for _ in lists]
    every: list[str] = []
    done = 0  # number of lists that have been passed

    def place(path: str, name: str, module: nn.Module, is_head: bool) -> None:
        if is_head or name == "pooler" or done == len(lists):
            last[-1].append(path)
        elif done and _common(path, lists[done - 1]) > _common(path, lists[done]):
            last[done - 1].append(path)
        else:
            first[done][path] = placeholder_for(module, name)

    def visit(path: str) -> None:
        nonlocal done
        owner = model.get_submodule(path)
        every.extend(f"{path}.{name}" if path else name for name in owner._parameters)
        base = getattr(model, "base_model_prefix", None)
        has_base = not path and hasattr(model, base or "")
        is_behind_base = False
        for name, module in with_parameters(owner):
            child = f"{path}.{name}" if path else name
            if child in lists:
                done += 1
            elif any(each.startswith(f"{child}.") for each in lists):
                visit(child)
            elif isinstance(module, nn.ModuleList) and len(module) == len(lists) and done < len(lists):
                for index, each in enumerate(module):
                    first[index][f"{child}.{index}"] = placeholder_for(each, name)
            else:
                place(child, name, module, is_head=has_base and is_behind_base)
            is_behind_base = is_behind_base or name == base

    visit("")
    return _linked(model, lists, first, last, every)


def _linked(
    model: nn.Module,
    lists: Sequence[str],
    first: Sequence[Mapping],
    last: Sequence[Sequence[str]],
    every: Sequence[str],
) -> StageLayout:
    layout = None
    for index in reversed(range(len(lists))):
        layout = StageLayout(
            layers=lists[index],
            first=first[index],
            every=tuple(every) if index == 0 else (),
            last=tuple(last[index]),
            tuple_output=num_outputs(model.get_submodule(lists[index])[0]),
            next_layers=layout,
        )
    return layout


def _common(path: str, other: str) -> int:
    """Return the number of leading parts that two paths have in common."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return next((index for index, (one, two) in enumerate(pairs) if one != two), 0)
