"""One start for all ranks: a head that was drawn without a seed differs from rank to rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.logging import get_logger

_logger = get_logger(__name__)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # element size -> dtype


def share_initial_weights(model: nn.Module) -> None:
    """Compare the whole model over all ranks, and take rank 0's weights where they differ, as torch's DDP does.

    Pieces of differently initialised models would fit together without an error, to a model that nobody built.

    Raises:
        ConfigurationError: the ranks built models of other names or shapes.
    """
    if dist.get_world_size() == 1:
        return
    tensors = dict(_tensors(model))
    structure = zlib.crc32(repr([(name, tuple(tensor.shape)) for name, tensor in tensors.items()]).encode())
    values = zlib.crc32(repr([_fingerprint(tensor) for tensor in tensors.values()]).encode())
    same_structure, same_values = _same_everywhere(structure, values)
    if not same_structure:
        raise ConfigurationError(
            f"the ranks built different models (rank {dist.get_rank()}: a {type(model).__name__} of {len(tensors)} "
            "tensors); build the same model from the same configuration on every rank"
        )
    if same_values:
        return
    if dist.get_rank() == 0:
        _logger.warning("the ranks built different initial weights; all take those of rank 0 (seed all ranks alike)")
    for tensor in tensors.values():
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.detach().copy_(whole)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that hold data, each once."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not tensor.is_meta:
            yield name, tensor


def _fingerprint(tensor: Tensor) -> int:
    """The sum of the bits read as integers: exact, and the same in whatever order threads add."""
    bits = tensor.detach().contiguous().flatten().view(_INTEGERS[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64))


def _same_everywhere(*numbers: int) -> list[bool]:
    extremes = torch.tensor([*numbers, *(-number for number in numbers)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = extremes.chunk(2)
    return (largest == -smallest).tolist()
