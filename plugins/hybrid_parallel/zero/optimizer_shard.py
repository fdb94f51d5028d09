"""OptimizerShard: the values that the optimizer updates on this rank, in one flat tensor.

These are this rank's shard of a bucket's parameters or, of parameters in 16 bit, an fp32 copy of the shard: the master
weights (Micikevicius et al., arXiv 1710.03740). The optimizer sees the tensor as pieces of parameters. Everything else
works on the whole tensor: on a GPU, a step then starts a few kernels for each bucket instead of for each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice, Source, StateMemory
from shardformer.shard_spec import parameter_like

_AT_ONCE = 2**25  # elements that are compared at a time: temporary memory is 7 bytes for each


class OptimizerShard:
    """Values of this rank's shard, as the optimizer updates them.

    Args:
        parameters: [shard], the shard's range of the parameters' memory.
        dtype: dtype of the values; if it is not that of the parameters, the values are master weights.
        start: start of the shard in the bucket.
        memory: where master weights are.

    Attributes:
        values: [shard].
        pieces: the parts of parameters in the shard.
        is_master: whether `values` are master weights.
        may_differ: whether other code may have changed the parameters since `write_parameters`.
    """

    def __init__(self, parameters: Tensor, dtype: torch.dtype, start: int, memory: StateMemory) -> None:
        self._parameters, self._start = parameters, start
        self.is_master = dtype != parameters.dtype
        self._is_copy = self.is_master or (memory.is_offloaded and parameters.device.type != "cpu")
        # Zeros between parameters, as in the bucket.
        self.values = memory.empty(len(parameters), dtype, parameters.device).zero_() if self._is_copy else parameters
        self.pieces: list[BucketSlice] = []
        self.may_differ = True

    def add_pieces(self, params: Sequence[nn.Parameter], offsets: Sequence[int], sources: Sequence[Source]) -> None:
        """Make the pieces of the parameters that begin at `offsets` of the bucket, with the values of `sources`.

        Those of which the shard has nothing are not asked for.
        """
        for index, (param, offset) in enumerate(zip(params, offsets, strict=True)):
            start = max(0, self._start - offset)
            stop = min(param.numel(), self._start + len(self.values) - offset)
            if start >= stop:
                continue
            place = offset + start - self._start
            view = self.values[place : place + stop - start]
            view.copy_(sources[index]().reshape(-1)[start:stop])
            whole = stop - start == param.numel()
            parameter = parameter_like(param, view.view_as(param) if whole else view).requires_grad_(True)
            self.pieces.append(BucketSlice(index, start, stop, place, parameter))

    def differs(self) -> Tensor | None:
        """Return on the GPU whether parameters are no longer the rounded values (0-d bool); None where it waits anyway.

        Comparing moves half of the memory that taking over does.
        """
        if not self._is_copy or self._parameters.device.type == "cpu" or self.values.device != self._parameters.device:
            return None
        parts = zip(self.values.split(_AT_ONCE), self._parameters.split(_AT_ONCE), strict=True)
        return torch.stack([(own.to(present.dtype) != present).any() for own, present in parts]).any()

    def take_changed_parameters(self) -> None:
        """Take over parameters that other code has changed since `write_parameters`.

        Master weights of elements that are still their rounded values stay as they are.
        """
        self._take_pieces_back()
        may_differ, self.may_differ = self.may_differ, True
        if not self._is_copy or not may_differ:
            return
        for own, present in zip(self.values.split(_AT_ONCE), self._parameters.split(_AT_ONCE), strict=True):
            master = own.to(present.device)
            rounded = master.to(present.dtype)
            # No comparison on a GPU: it would have to synchronize with the device, as a copy from the host does anyway.
            if (present.device.type != "cpu" and master is own) or not torch.equal(rounded, present):
                torch.where(rounded == present, master, present.to(master.dtype), out=master)
                if master is not own:
                    own.copy_(master)

    def write_parameters(self) -> None:
        """Write updated values to the shard of the parameters."""
        self._take_pieces_back()
        if self._is_copy:
            self._parameters.copy_(self.values, non_blocking=True)

    def read_parameters(self) -> None:
        """Take the parameters' values for master weights."""
        self._take_pieces_back()
        if self._is_copy:
            self.values.copy_(self._parameters)

    def _take_pieces_back(self) -> None:
        """Move pieces whose `data` was replaced, as some optimizers do to update them, back into `values`.

        Raises:
            ConfigurationError: if a piece now has another shape or dtype.
        """
        start, size = self.values.data_ptr(), self.values.element_size()
        for piece in self.pieces:
            if piece.parameter.data_ptr() != start + piece.offset * size:
                take_back(piece.parameter, piece.view(self.values))


def take_back(param: nn.Parameter, place: Tensor) -> None:
    """Move a parameter whose `data` was replaced back to its place in flat memory."""
    if param.dtype != place.dtype or param.numel() != place.numel():
        raise ConfigurationError(
            f"a parameter became a {tuple(param.shape)} of {param.dtype} after boost(), where its optimizer knows "
            f"{place.numel()} values of {place.dtype}; change shapes and dtypes before boost()"
        )
    place.copy_(param.data.reshape(-1))
    param.data = place.view(param.shape)


def look_at(norm: Tensor, shards: Sequence[OptimizerShard]) -> bool:
    """Return whether a norm is finite; the same wait for a GPU tells which shards need not be compared again.

    Call it right before `take_changed_parameters`: what is changed in between is not seen.
    """
    asked = [(shard, changed) for shard in shards if (changed := shard.differs()) is not None]
    flags = [each for _, each in asked]
    is_finite = torch.isfinite(norm)
    finite, *changed = torch.stack([is_finite.to(flags[0].device) if flags else is_finite, *flags]).tolist()
    for (shard, _), is_changed in zip(asked, changed, strict=True):
        shard.may_differ = is_changed or not finite  # a step that is skipped takes nothing
    return finite
