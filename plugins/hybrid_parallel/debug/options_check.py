"""Check that all ranks have the same options: different options create different groups, and hang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.agreement import all_gather_json
from plugins.hybrid_parallel.distributed.checksum import checksum_of
from shardformer import TPInfo
from shardformer.distributed.process_groups import world_group


def check_options(options: Mapping[str, Any]) -> None:
    """Compare the options of all ranks.

    Args:
        options: the keywords of `HybridParallelPlugin` on this rank, all of them.

    Raises:
        ConfigurationError: if they differ; raised on all ranks, with the first difference.
    """
    if dist.get_world_size() == 1:
        return
    options = {name: _plain(value) for name, value in options.items()}
    number = checksum_of(options)
    extremes = torch.tensor([number, -number])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=world_group())
    if extremes[0] == -extremes[1]:
        return
    everyone = all_gather_json(options)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise ConfigurationError(
                    f"{name} differs between ranks 0 and {rank} ({value} and {other[name]}); "
                    f"use {name}={value} on all ranks"
                )


def _plain(value: object) -> str:
    """Return the comparable part of an option's value as text: for a policy, its class."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=repr)
    if value is None or isinstance(value, str | int | float | list | tuple | Path | TPInfo):
        return repr(value)
    return (value if isinstance(value, type) else type(value)).__qualname__
