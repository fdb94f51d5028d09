"""Point-to-point communication between neighbouring stages.

Receives are posted ahead and waited for when the tensor is needed; sends are never waited for until the end of the
step. A stage's output may have any shape: the first time two neighbours see a micro-batch of some signature, a small
header with shapes and dtypes travels ahead; later ones are known on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MAX_DIMS = 6
_HEADER_LENGTH = 2 + _MAX_DIMS  # dtype, number of dims, dims


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def to_header(self) -> Tensor:
        dims = [*self.shape, *[0] * (_MAX_DIMS - len(self.shape))]
        return torch.tensor([_DTYPES.index(self.dtype), len(self.shape), *dims])

    @staticmethod
    def from_header(header: Tensor) -> TensorSpec:
        dtype, num_dims, *dims = header.tolist()
        return TensorSpec(tuple(dims[:num_dims]), _DTYPES[dtype])


class PendingReceive:
    """A receive that has been posted."""

    def __init__(self, tensor: Tensor, work: Any, what: str) -> None:
        self.tensor, self.work, self.what = tensor, work, what

    def wait(self) -> Tensor:
        """The tensor, once it is here.

        Raises:
            RuntimeError: it did not come, with who was waiting for what.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {dist.get_rank()} waited in vain for {self.what}: {error}") from error
        return self.tensor


class Channel:
    """One direction between this stage and a neighbour.

    Args:
        peer: global rank of the neighbour.
        group: the group of this direction.
        device: where payloads live.
        name: what travels and where to, for messages.
    """

    def __init__(self, peer: int, group: ProcessGroup, device: torch.device, name: str) -> None:
        self.peer, self.group, self.device, self.name = peer, group, device, name
        self._known: dict[tuple, TensorSpec] = {}
        self._sends: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, key: tuple) -> None:
        """Send a tensor for a micro-batch of signature `key`; returns at once."""
        if key not in self._known:
            self._known[key] = TensorSpec.of(tensor)
            self._isend(self._known[key].to_header())
        self._isend(tensor.detach().contiguous())

    def post_receive(self, key: tuple, microbatch: int, spec: TensorSpec | None = None) -> PendingReceive:
        """Post the receive of the next tensor; `spec` where this side knows it (a gradient is like its activation)."""
        what = f"{self.name} of micro-batch {microbatch} from rank {self.peer}"
        if spec is None:
            spec = self._known.get(key)
        if spec is None:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64)
            work = dist.irecv(header, self.peer, group=self.group)
            spec = self._known[key] = TensorSpec.from_header(
                PendingReceive(header, work, f"the shape of {what}").wait()
            )
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return PendingReceive(tensor, dist.irecv(tensor, self.peer, group=self.group), what)

    def knows(self, key: tuple) -> bool:
        """Whether a receive can be posted without waiting for a header."""
        return key in self._known

    def mark_known(self, key: tuple, spec: TensorSpec) -> None:
        """Both sides know the shape without a header (gradients)."""
        self._known[key] = spec

    def release(self) -> None:
        """Let go of the tensors whose sends are complete."""
        self._sends = [(work, tensor) for work, tensor in self._sends if not work.is_completed()]

    def flush(self) -> None:
        """Wait until every send is complete.

        Raises:
            RuntimeError: the neighbour did not take one, with who was sending what.
        """
        for work, _ in self._sends:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {dist.get_rank()} could not send {self.name} to rank {self.peer}: {error}"
                ) from error
        self._sends.clear()

    def _isend(self, tensor: Tensor) -> None:
        self._sends.append((dist.isend(tensor, self.peer, group=self.group), tensor))
