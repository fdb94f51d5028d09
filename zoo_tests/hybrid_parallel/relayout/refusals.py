"""Changes of the layout that are refused, and the training that continues after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin, ShardedEMA
from zoo_tests.harness.case import Recipe
from zoo_tests.hybrid_parallel.relayout.chain import boosted, moved

RECIPE = Recipe(family="llama", head="causal_lm", optimizer="adamw", precision="fp32", rows=72)


def refused(mistake: str) -> tuple[str, bool]:
    """Make a mistake; return what is said, and whether the losses are those without it."""
    said: list[str] = []
    try:
        with_it = _losses(mistake, said)
    except ConfigurationError as error:  # the job cannot continue
        return f"{' '.join(said)}; then: {error}", False
    return " ".join(said), with_it == _losses(None, said)


def _losses(mistake: str | None, said: list[str]) -> list[float]:
    """Train three steps, of which the second is interrupted before or after its update."""
    booster, objects = boosted(RECIPE, "tp2dp2", {})
    model, optimizer, _, loader = objects
    losses = []
    for number, batch in zip(range(3), loader, strict=False):
        losses.append(float(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss))
        if mistake == "gradients" and number == 1:
            said.append(_sentence(_gradients, booster, objects))
        optimizer.step()
        optimizer.zero_grad()
        if mistake not in (None, "gradients") and number == 1:
            said.append(_sentence(MISTAKES[mistake], booster, objects))
    return losses


def _sentence(mistake: Callable[..., None], booster: Booster, objects: Any) -> str:
    try:
        mistake(booster, objects)
    except ConfigurationError as error:
        return str(error)
    return "it was not refused"


def _gradients(booster: Booster, objects: Any) -> None:
    booster.relayout(HybridParallelPlugin(tp_size=4), *objects)


def _layout(booster: Booster, objects: Any) -> None:
    booster.relayout(
        HybridParallelPlugin(pp_size=4, num_microbatches=4, pp_style="interleaved", num_model_chunks=4), *objects
    )


def _plain_loader(booster: Booster, objects: Any) -> None:
    model, optimizer, scheduler, loader = objects
    booster.relayout(HybridParallelPlugin(tp_size=4), model, optimizer, scheduler, DataLoader(loader.dataset))


def _no_optimizer(booster: Booster, objects: Any) -> None:
    booster.relayout(HybridParallelPlugin(tp_size=4), objects[0])


def _average(booster: Booster, objects: Any) -> None:
    ShardedEMA(objects[1], decay=0.9)
    booster.relayout(HybridParallelPlugin(tp_size=4), *objects)


MISTAKES: dict[str, Callable[..., None]] = {
    "layout": _layout,
    "loader": _plain_loader,
    "optimizer": _no_optimizer,
    "plugin": lambda booster, objects: booster.relayout(*objects),
    "average": _average,
}


def use_what_has_moved() -> list[str]:
    """Use the objects that were given to a change of the layout; return what is said."""
    booster, objects = boosted(RECIPE, "tp2dp2", {})
    model, optimizer, *_ = objects
    batch = next(iter(objects[3]))
    moved(booster, objects, RECIPE, "tp4", {})
    said = []
    for use in (
        lambda: model(**batch),
        lambda: booster.execute_pipeline(iter([batch]), model, optimizer=optimizer),
        lambda: optimizer.step(),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ):
        try:
            use()
        except ConfigurationError as error:
            said.append(str(error))
    return said
