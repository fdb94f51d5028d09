"""The layout for the ranks that are there, where they are fewer than those that the script's layout is for."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from booster.elastic.place import ElasticPlace
from booster.errors import ConfigurationError
from booster.launch import elastic_place
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.agreement import all_gather_json
from plugins.hybrid_parallel.distributed.mesh import control_group
from plugins.hybrid_parallel.elastic.ahead import PlansAhead
from plugins.hybrid_parallel.elastic.boundary import leave

_SIZES = ("tp_size", "pp_size", "cp_size")
# Options that belong to the sizes of the script's layout.
_BOUND_TO_SIZES = ("dp_size", "sp_size", "layers_per_stage", "device_mapping", "zero_size", "num_microbatches")
_OF_SEQUENCES = ("enable_sequence_parallelism", "sequence_parallelism_mode", "enable_sequence_overlap")


def for_present_ranks(options: dict[str, Any]) -> tuple[dict[str, Any], PlansAhead]:
    """Return the options of a plugin for the ranks that are there, and what plans for other numbers of ranks.

    Outside of an elastic job, or with as many ranks as its `--max-ranks`, these are the options as given. In a job with
    too few ranks for any layout, or with a number of ranks that none fits, all ranks leave, and ask for a round with
    fewer.

    Args:
        options: keywords of `HybridParallelPlugin`, for the largest number of ranks.

    Raises:
        ConfigurationError: the options are invalid, or no layout fits; raised on all ranks.
    """
    place = elastic_place()
    if place is None:
        return options, PlansAhead()
    if not dist.is_initialized():
        raise ConfigurationError(
            "HybridParallelPlugin() of an elastic job must know how many ranks are there; call launch_from_torch() "
            "before it"
        )
    place.note("started", rank=dist.get_rank())
    # Imported here, because torch's checkpoint modules take half as long to import as torch itself.
    from plugins.hybrid_parallel.elastic.search import newest_snapshot

    config = HybridParallelConfig.from_options(**options)
    config.parallel.data_parallel_size(place.max_ranks)
    found = newest_snapshot(None, control_group())
    known = {} if found is None else found.headers[0]["plans"]
    plans = PlansAhead(place, config, known)
    world_size = dist.get_world_size()
    if world_size == place.max_ranks:
        place.note(
            "planned", rank=dist.get_rank(), layout=config.layout(config.parallel.data_parallel_size(world_size))
        )
        return options, plans
    loader = None if found is None else found.state["dataloader"]
    global_batch = None if loader is None else loader["global_batch_size"]
    choice = LayoutChoice(options, config, known, global_batch)
    chosen = choice.best(world_size)
    if chosen is None:
        _leave_with_fewer(choice, world_size, place)
    _tell(HybridParallelConfig.from_options(**chosen), choice, world_size, place)
    return chosen, plans


class LayoutChoice:
    """Choice of a layout by the number of ranks.

    Args:
        options: keywords of the plugin.
        config: the same, checked.
        known: plans that were made ahead.
        global_batch: samples of a step; None before the first.
    """

    def __init__(
        self,
        options: dict[str, Any],
        config: HybridParallelConfig,
        known: Mapping[str, Any],
        global_batch: int | None,
    ) -> None:
        self._options, self._config, self._known, self._global_batch = options, config, known, global_batch

    def best(self, world_size: int) -> dict[str, Any] | None:
        """Return the options for a number of ranks; None if no layout fits."""
        for layout in self._candidates(world_size):
            block = math.prod(layout.get(name, 1) for name in _SIZES)
            if world_size % block or (self._global_batch or 0) % (world_size // block):
                continue
            options = self._with(layout, world_size // block)
            try:
                config = HybridParallelConfig.from_options(**options)
                config.zero.num_shards(config.parallel.data_parallel_size(world_size) * config.parallel.cp_size)
            except ConfigurationError:
                continue
            return options
        return None

    def plan_s(self, world_size: int) -> float | None:
        """Return how long the plan for a number of ranks took; None without a plan."""
        is_planned = self._config.parallel.elastic_layouts is None
        return self._known.get(str(world_size), {}).get("seconds") if is_planned else None

    def _candidates(self, world_size: int) -> Iterator[Mapping[str, Any]]:
        """Yield layouts in the order of preference: the user's own, the plan, parts of the script's layout."""
        users = self._config.parallel.elastic_layouts
        if users is not None:
            yield from [users(world_size)] if callable(users) else users
            return
        plan = self._known.get(str(world_size))
        if plan is not None:
            yield from [plan["options"]] if "options" in plan else []
            return
        given = {name: getattr(self._config.parallel, name) for name in _SIZES}
        smaller = [
            {"tp_size": tp, "pp_size": pp, "cp_size": cp}
            for tp in _divisors(given["tp_size"])
            for pp in _divisors(given["pp_size"])
            for cp in _divisors(given["cp_size"])
        ]
        # The more ranks share the state, the less memory each needs.
        yield from sorted(smaller, key=lambda sizes: (-math.prod(sizes.values()), -sizes["tp_size"]))

    def _with(self, layout: Mapping[str, Any], dp_size: int) -> dict[str, Any]:
        """Return the script's options under another layout."""
        options = {name: value for name, value in self._options.items() if name not in _BOUND_TO_SIZES}
        options |= {name: 1 for name in _SIZES if name in options} | dict(layout)
        if options.get("tp_size", 1) == options.get("cp_size", 1) == 1:
            options = {name: value for name, value in options.items() if name not in _OF_SEQUENCES}
        if "ep_size" in options:
            options["ep_size"] = math.gcd(options["ep_size"], dp_size * options.get("cp_size", 1))
        return options


def _divisors(size: int) -> list[int]:
    return [each for each in range(1, size + 1) if size % each == 0]


def _leave_with_fewer(choice: LayoutChoice, world_size: int, place: ElasticPlace) -> None:
    """Have the job go on with fewer ranks, if a layout fits those."""
    fewer = next((count for count in range(world_size - 1, 0, -1) if choice.best(count) is not None), None)
    if fewer is None:
        raise ConfigurationError(
            f"no layout fits {world_size} ranks or fewer; start more agents, or give elastic_layouts one for fewer"
        )
    place.set_limit(fewer)
    if dist.get_rank() == 0:
        sys.stderr.write(f"elastic: no layout fits {world_size} ranks; going on with {fewer}\n")
    all_gather_json(None, control_group())  # all have written the limit
    leave(place)


def _tell(config: HybridParallelConfig, choice: LayoutChoice, world_size: int, place: ElasticPlace) -> None:
    layout = config.layout(config.parallel.data_parallel_size(world_size))
    place.note("planned", rank=dist.get_rank(), layout=layout, plan_s=choice.plan_s(world_size))
    if dist.get_rank() == 0:
        sys.stderr.write(f"elastic: {world_size} of {place.max_ranks} ranks are there; layout {layout}\n")
