"""Agreement between ranks about files: what one finds, all know. JSON travels, never pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster.errors import ConfigurationError


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order."""
    payload = json.dumps(value).encode()
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return [json.loads(payload)]
    lengths = [torch.zeros((), dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor(len(payload)), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffers = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(buffers, padded, group=group)
    return [
        json.loads(buffer[: int(length)].numpy().tobytes()) for buffer, length in zip(buffers, lengths, strict=True)
    ]


def together(work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Do file work on this rank; if it fails on any rank of the group, it is an error on all.

    Raises:
        ConfigurationError: the first failure, in one sentence.
    """
    result, problem = None, None
    try:
        result = work()
    except (OSError, ValueError, KeyError) as error:
        problem = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
    problems = [found for found in all_gather_json(problem, group) if found is not None]
    if problems:
        raise ConfigurationError(problems[0])
    return result
