"""One start for all ranks: a head that was drawn without a seed differs from rank to rank."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.checksum import checksum

_logger = get_logger(__name__)


def share_initial_weights(model: nn.Module) -> None:
    """Compare the whole model over all ranks, and take rank 0's weights where they differ, as torch's DDP does.

    Pieces of differently initialised models would fit together without an error, to a model that nobody built.

    Raises:
        ConfigurationError: the ranks built models of other names or shapes.
    """
    if dist.get_world_size() == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    structure = zlib.crc32(repr([(name, tuple(tensor.shape), tensor.is_meta) for name, tensor in named]).encode())
    tensors = {name: tensor for name, tensor in named if not tensor.is_meta}
    values = zlib.crc32(repr([checksum(tensor) for tensor in tensors.values()]).encode())
    same_structure, same_values = _same_everywhere(structure, values)
    if not same_structure:
        raise ConfigurationError(
            f"the ranks built different models (rank {dist.get_rank()}: a {type(model).__name__} of {len(named)} "
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


def _same_everywhere(*numbers: int) -> list[bool]:
    extremes = torch.tensor([*numbers, *(-number for number in numbers)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = extremes.chunk(2)
    return (largest == -smallest).tolist()
