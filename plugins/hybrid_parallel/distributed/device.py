"""The device of this rank, in process groups of this library and of the user."""

from __future__ import annotations

import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.agreement import all_gather_json


def current_device() -> torch.device:
    """Return the device that this rank trains on: its GPU if there is one, otherwise the CPU.

    The GPU is the one that the default process group is bound to (`init_process_group(device_id=...)`); without that
    it is torch's current one.
    """
    if not (torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())):
        return torch.device("cpu")
    bound = dist.group.WORLD.bound_device_id
    return torch.device("cuda", torch.cuda.current_device()) if bound is None else bound


def claim_device() -> torch.device:
    """Make `current_device` torch's current one and return it; all ranks of the world must call this.

    Raises:
        ConfigurationError: two ranks train on the same GPU, for which NCCL has no communicator; raised on all ranks.
    """
    device = current_device()
    if device.type != "cuda":
        return device
    if device.index != torch.cuda.current_device():
        torch.cuda.set_device(device)  # streams and events are those of the current device
    identifier = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    check_own_device(all_gather_json(None if identifier is None else str(identifier)))
    return device


def check_own_device(identifiers: list[str | None]) -> None:
    """Check that each rank has a GPU of its own.

    Args:
        identifiers: UUID of each rank's GPU; None if unknown.

    Raises:
        ConfigurationError: two ranks have the same one.
    """
    first: dict[str, int] = {}
    for rank, identifier in enumerate(identifiers):
        if identifier is None:
            continue
        if identifier in first:
            raise ConfigurationError(
                f"ranks {first[identifier]} and {rank} use the same GPU ({identifier}), and NCCL needs one for each "
                "rank; start one rank per GPU, and call launch_from_torch or torch.cuda.set_device(LOCAL_RANK) first"
            )
        first[identifier] = rank
