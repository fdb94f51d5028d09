"""Makes a failing case smaller, change by change, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zoo_tests.campaigns.fuzz.case import Case
from zoo_tests.campaigns.fuzz.families import FAMILIES
from zoo_tests.campaigns.fuzz.trial import Outcome

_AXES = ("tp_size", "pp_size", "cp_size")
_PLAIN_OPTIMIZER = {"name": "SGD", "lr": 0.2, "groups": "one"}


def shrink(case: Case, outcome: Outcome, run: Callable[[Case], Outcome], limit_s: float) -> tuple[Case, Outcome]:
    """The smallest case that was found, and what comes of it.

    Args:
        case, outcome: what failed, and how.
        run: plays a case.
        limit_s: seconds until the smallest so far is taken.
    """
    deadline, progress = time.monotonic() + limit_s, True
    refused: set[str] = set()
    while progress:
        progress = False
        for smaller in _smaller(case):
            if time.monotonic() > deadline:
                return case, outcome
            text = smaller.to_json()
            if text in refused:
                continue
            found = run(smaller)
            if found.is_failure and found.signature == outcome.signature:
                case, outcome, progress = smaller, found, True
                break
            refused.add(text)
    return case, outcome


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, what takes away most first."""
    yield from _fewer_actions(case)
    yield from _smaller_layouts(case)
    for name in case.plugin:
        if name not in _AXES:
            yield case.but(plugin=_without(case.plugin, name))
    if case.head != FAMILIES[case.family].main_head:
        yield case.but(head=FAMILIES[case.family].main_head)
    for name, simple in (("lora", {}), ("scheduler", {}), ("frozen", ()), ("padding", "none")):
        if getattr(case, name) != simple:
            yield case.but(**{name: simple})
    if dict(case.optimizer) != _PLAIN_OPTIMIZER:
        yield case.but(optimizer=_PLAIN_OPTIMIZER)
    if case.optimizer["groups"] != "one":
        yield case.but(optimizer={**case.optimizer, "groups": "one"})
    for name in case.config:
        yield case.but(config=_without(case.config, name))
    for index, action in enumerate(case.script):
        yield from _simpler_actions(case, index, action)


def _fewer_actions(case: Case) -> Iterator[Case]:
    for index in reversed(range(len(case.script))):
        if len(case.script) > 1:
            yield case.but(script=case.script[:index] + case.script[index + 1 :])


def _smaller_layouts(case: Case) -> Iterator[Case]:
    """With one axis less, where all layouts of the script still fill the smaller world."""
    reloads = [action["plugin"] for action in case.script if action["do"] == "reload"]
    for world_size in range(1, case.world_size):
        if case.world_size % world_size:
            continue
        factor = case.world_size // world_size
        if any(_replicas(plugin, case.world_size) % factor for plugin in (case.plugin, *reloads)):
            continue
        yield case.but(world_size=world_size, plugin=_fitting(case.plugin, world_size))
    for axis in _AXES:
        if case.plugin.get(axis, 1) > 1 and not reloads:
            world_size = case.world_size // case.plugin[axis]
            smaller = _without(case.plugin, axis, "layers_per_stage", "ep_size", "enable_sequence_parallelism")
            yield case.but(world_size=world_size, plugin=smaller)
    for axis in _AXES:
        if case.plugin.get(axis, 1) > 1:
            yield case.but(plugin=_without(case.plugin, axis, "layers_per_stage", "ep_size"))


def _replicas(plugin: Mapping[str, Any], world_size: int) -> int:
    for axis in _AXES:
        world_size //= plugin.get(axis, 1)
    return world_size


def _fitting(plugin: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    kept = dict(plugin)
    if _replicas(plugin, world_size) % kept.get("ep_size", 1):
        kept.pop("ep_size")
    return kept


def _simpler_actions(case: Case, index: int, action: Mapping[str, Any]) -> Iterator[Case]:
    simpler = [_without(action, name) for name in ("way", "parts", "ignored", "zero", "asynchronous") if name in action]
    if action["do"] == "reload":
        plugins = [_without(action["plugin"], name) for name in action["plugin"] if name not in _AXES]
        simpler += [{**action, "plugin": plugin} for plugin in (case.plugin, *plugins) if plugin != action["plugin"]]
    for each in simpler:
        yield case.but(script=(*case.script[:index], each, *case.script[index + 1 :]))


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
