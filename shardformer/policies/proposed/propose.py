"""Candidates for a model's plan: one for each tensor-parallel region, and those for its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.distributed.random import random_numbers_apart
from shardformer.policies.proposed.plan import ProposedPlan
from shardformer.policies.proposed.regions import Recording, find_regions, local_choices, record, with_own_masks
from shardformer.utils.customizations import stored_weight
from shardformer.utils.module_paths import starred

Alternatives = list[ProposedPlan]
_LARGE = 64  # features of a head or rows of an embedding from which on it is worth a collective


def candidates(model: nn.Module, batch: Mapping[str, Any]) -> list[Alternatives]:
    """Return what can be sharded: for each part of the plan alternatives; the first that trains exactly counts.

    Parts are independent of each other, and the whole plan is that of all parts (`ProposedPlan.joined`).

    Args:
        model: the whole model, small enough for one forward pass.
        batch: inputs of its forward.
    """
    names = ("attention_mask",)  # a fully padded row has no derivatives
    whole = {name: torch.ones_like(value) if name in names else value for name, value in batch.items()}
    with random_numbers_apart():
        recording = record(model, lambda: model(**whole))
    found_regions = [with_own_masks(model, region) for region in find_regions(model, recording)]
    regions = [region for region in found_regions if region is not None]
    found = [[ProposedPlan(region.styles, local) for local in local_choices(model, region)] for region in regions]
    planned = {path for region in regions for path in region.styles}
    found += [[ProposedPlan({path: style})] for path, style in _single(model, recording).items() if path not in planned]
    return [*found, [ProposedPlan({}, {}, True, False), ProposedPlan({}, {}, True, True)]]


def propose_plan(model: nn.Module, batch: Mapping[str, Any]) -> ProposedPlan:
    """Derive a tensor-parallel plan from one forward pass of a model, the same on every rank.

    The plan is not verified: `booster verify DIR --propose` and `plugins.hybrid_parallel.verify.propose` train a tiny
    model with each part of it, and drop what differs.

    Args:
        model: the whole model, on any device but "meta".
        batch: inputs of its forward, keyed by argument name.

    Returns:
        A plan, whose `policy()` is a `custom_policy` and whose `save` writes editable JSON.
    """
    plan = ProposedPlan()
    for alternatives in candidates(model, batch):
        plan = plan.joined(alternatives[-1] if alternatives[0].cut_vocabulary else alternatives[0])
    return plan


def _single(model: nn.Module, recording: Recording) -> dict[str, str]:
    """Return the styles of layers that are cut by themselves: large heads, and embeddings of models without a getter.

    The result of each is whole on every rank again.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    owners: dict[int, int] = {}
    for name in names:
        owners[id(model.get_parameter(name))] = owners.get(id(model.get_parameter(name)), 0) + 1
    styles = {}
    known = {id(module) for getter in _GETTERS if (module := _asked(model, getter)) is not None}
    for path, module in model.named_modules():
        weight = stored_weight(module)
        if id(module) in known or not isinstance(weight, Tensor) or owners.get(id(weight)) != 1:
            continue
        is_head = path in recording.outputs.sources and starred(path) == path and type(module) is nn.Linear
        if is_head and len(weight) >= _LARGE and f"{path}.weight" not in recording.outputs.parameters:
            styles[path] = "colwise_gather_output"
        elif type(module) is nn.Embedding and not known and module.num_embeddings >= _LARGE:
            styles[starred(path)] = "embedding_rowwise"
    return styles


_GETTERS = ("get_input_embeddings", "get_output_embeddings")


def _asked(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
