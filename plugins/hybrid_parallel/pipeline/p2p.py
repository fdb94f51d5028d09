"""Point-to-point communication between neighbouring stages, on different ranks or on the same rank.

Receives are posted early and waited for when the tensor is needed. Sends are only waited for at the end of the step.
Headers and numbers are CPU tensors, so a group on CUDA needs a backend for the CPU too.
A message is the hidden state and the other tensors that a stage's layers need, some of which may be None. Shapes are
arbitrary: the first time two neighbours see a micro-batch of some signature, a small header with shapes and dtypes is
sent first. Later messages need no header, because both sides know the shapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.distributed.mesh import HybridMesh, link_group
from plugins.hybrid_parallel.pipeline.schedule import Schedule
from shardformer.stages.placeholders import StageMessage

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MAX_DIMS = 6
_MAX_TENSORS = 256
_SPEC_LENGTH = 3 + _MAX_DIMS  # dtype, whether a gradient comes back, number of dims, dims
_HEADER_LENGTH = 1 + _MAX_TENSORS * _SPEC_LENGTH


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a sent tensor, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


Specs = tuple[TensorSpec | None, ...]


def specs_of(message: StageMessage) -> Specs:
    """Return the specs of a message's tensors."""
    return tuple(None if tensor is None else TensorSpec.of(tensor) for tensor in message)


def to_header(specs: Specs) -> Tensor:
    """Encode the specs of a message of up to 256 tensors in a tensor of fixed size."""
    if len(specs) > _MAX_TENSORS:
        raise ValueError(f"a message between pipeline stages has {len(specs)} tensors, more than {_MAX_TENSORS}")
    header = torch.full((_HEADER_LENGTH,), -1, dtype=torch.int64)
    header[0] = len(specs)
    for row, spec in zip(header[1:].view(_MAX_TENSORS, _SPEC_LENGTH), specs, strict=False):
        if spec is not None:
            values = [_DTYPES.index(spec.dtype), int(spec.needs_grad), len(spec.shape), *spec.shape]
            row[: len(values)] = torch.tensor(values)
    return header


def from_header(header: Tensor) -> Specs:
    """Decode the specs of a message; the inverse of `to_header`."""
    count, rows = int(header[0]), header[1:].view(_MAX_TENSORS, _SPEC_LENGTH).tolist()
    return tuple(
        None if dtype < 0 else TensorSpec(tuple(dims[:num_dims]), _DTYPES[dtype], bool(needs_grad))
        for dtype, needs_grad, num_dims, *dims in rows[:count]
    )


class PendingReceive:
    """A receive whose message is allocated, and which is posted at once or later.

    Args:
        what: description of the message, for errors.
    """

    def __init__(self, message: StageMessage, channel: Channel, what: str) -> None:
        self.message, self.channel, self.what = message, channel, what
        self._works: list[Any] | None = None
        # The message reuses memory that kernels queued so far may still read; the receive starts after them.
        self._allocated = None if channel.stream is None else torch.cuda.current_stream(channel.device).record_event()

    def post(self) -> None:
        """Post the receive, unless it is posted already; returns at once."""
        if self._works is not None:
            return
        stream = self.channel.stream
        if stream is not None:
            # On a stream of its own: behind the kernels of this moment, the message would arrive after them.
            stream.wait_event(self._allocated)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._works = [self.channel.irecv(tensor) for tensor in self.message if tensor is not None]

    def wait(self) -> StageMessage:
        """Wait for the message, which has been posted, and return it.

        On CUDA, the current stream waits instead of the host, so that memory freed later is not written to any more.

        Raises:
            RuntimeError: if it did not arrive; the error names the waiting rank and the missing message.
        """
        _wait_for(self._works, self.what)
        return self.message


def _wait_for(works: list[Any], what: str) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()} waited without an answer for {what}: {error}") from error


class Channel:
    """One direction of communication between this stage and a neighbour.

    Args:
        peer: global rank of the neighbour.
        name: description of what is sent, for error messages.
        stream: the stream on which receives are posted; None without CUDA.
    """

    def __init__(
        self,
        peer: int,
        group: ProcessGroup,
        device: torch.device,
        name: str,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.peer, self.group, self.device, self.name, self.stream = peer, group, device, name, stream
        self._known: dict[tuple, Specs] = {}
        self._sends: list[tuple[Any, Tensor]] = []

    def send(self, message: StageMessage, key: tuple) -> None:
        """Send the tensors for a micro-batch with signature `key`; returns at once."""
        # All copies before the first send: an allocation may wait for the device, and so for that send.
        payloads = [tensor.detach().contiguous() for tensor in message if tensor is not None]
        if key not in self._known:
            self._known[key] = specs_of(message)
            self._isend(to_header(self._known[key]))
        for payload in payloads:
            self._isend(payload)

    def send_number(self, number: int) -> None:
        """Send a number that the neighbour waits for; returns at once."""
        self._isend(torch.tensor([number]))

    def receive_number(self) -> int:
        """Receive a number from the neighbour."""
        number = torch.zeros(1, dtype=torch.int64)
        _wait_for([self.irecv(number)], self.name)
        return int(number)

    def prepare_receive(self, key: tuple, microbatch: int, specs: Specs | None = None) -> PendingReceive:
        """Return the next message's receive, posted at once on CPUs, with its header; `specs`: if known here."""
        what = f"{self.name} of micro-batch {microbatch} from rank {self.peer}"
        if specs is None:
            specs = self._known.get(key)
        if specs is None:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64)
            _wait_for([self.irecv(header)], f"the shape of {what}")
            specs = self._known[key] = from_header(header)
        message = tuple(
            None if spec is None else torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs
        )
        pending = PendingReceive(message, self, what)
        if self.stream is None:
            pending.post()
        return pending

    def irecv(self, tensor: Tensor) -> Any:
        """Post the receive of one tensor and return torch's handle of it."""
        return dist.irecv(tensor, self.peer, group=self.group)

    def warm_up(self, sends: bool) -> None:
        """Exchange a byte with the neighbour, which does the opposite: the first message makes a communicator."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        work = dist.isend(byte, self.peer, group=self.group) if sends else self.irecv(byte)
        _wait_for([work], f"the first message between it and rank {self.peer}")
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def specs(self, key: tuple) -> Specs:
        """Return the specs of messages for micro-batches with signature `key`, after one was sent or received."""
        return self._known[key]

    def knows(self, key: tuple) -> bool:
        """Return whether a receive can be posted without waiting for a header."""
        return key in self._known

    def mark_known(self, key: tuple, specs: Specs) -> None:
        """Record specs that both sides know without a header (gradients)."""
        self._known[key] = specs

    def release(self) -> None:
        """Release the tensors whose sends are complete."""
        self._sends = [(work, tensor) for work, tensor in self._sends if not work.is_completed()]

    def flush(self) -> None:
        """Wait until every send is complete; RuntimeError, naming sender and message, if the neighbour took none."""
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


class LocalChannel:
    """One direction between two stages of this rank: tensors are handed over directly."""

    def __init__(self) -> None:
        self._known: dict[tuple, Specs] = {}
        self._waiting: deque[StageMessage] = deque()

    def send(self, message: StageMessage, key: tuple) -> None:
        """Store the tensors for a micro-batch with signature `key`."""
        self._known[key] = specs_of(message)
        self._waiting.append(tuple(None if tensor is None else tensor.detach() for tensor in message))

    def wait(self) -> StageMessage:
        """Take the oldest stored message."""
        return self._waiting.popleft()

    def specs(self, key: tuple) -> Specs:
        """Return the specs of messages for micro-batches with signature `key`, after one was sent."""
        return self._known[key]

    def mark_known(self, key: tuple, specs: Specs) -> None:
        """Record the specs of messages; there are no headers."""
        self._known[key] = specs

    def release(self) -> None:
        """Do nothing: messages are not kept after they are taken."""

    def flush(self) -> None:
        """Do nothing: there are no pending sends."""


AnyChannel = Channel | LocalChannel


@dataclass
class Links:
    """The channels of one stage; None where there is no neighbour."""

    activations_in: AnyChannel | None = None
    activations_out: AnyChannel | None = None
    gradients_in: AnyChannel | None = None
    gradients_out: AnyChannel | None = None


def connect(mesh: HybridMesh, schedule: Schedule, num_chunks: int) -> dict[int, Links]:
    """Create the channels of this rank's stages of a `schedule`, all ranks the groups of all, in one order."""
    num_ranks, here, device = mesh.size("pp"), mesh.rank("pp"), mesh.device
    num_stages = num_chunks * num_ranks
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    links = {stage: Links() for stage in schedule.stages_of(here, num_ranks, num_chunks)}
    for stage in range(num_stages - 1):
        source, target = (schedule.rank_of(each, num_ranks) for each in (stage, stage + 1))
        if source == target:
            if source == here:
                links[stage].activations_out = links[stage + 1].activations_in = LocalChannel()
                links[stage + 1].gradients_out = links[stage].gradients_in = LocalChannel()
            continue
        # Between two ranks, each direction of each chunk has its own group.
        link = stage // num_ranks, source < target
        forward, backward = link_group(mesh, "activations", *link), link_group(mesh, "gradients", *link)
        ranks = mesh.stage_ranks
        if source == here:
            links[stage].activations_out = Channel(ranks[target], forward, device, "the activation", stream)
            links[stage].gradients_in = Channel(ranks[target], backward, device, "the gradient", stream)
        if target == here:
            links[stage + 1].activations_in = Channel(ranks[source], forward, device, "the activation", stream)
            links[stage + 1].gradients_out = Channel(ranks[source], backward, device, "the gradient", stream)
    if device.type == "cuda":
        # Once for each grid of ranks: a copy of the model uses the same groups, and one rank alone may make it.
        mesh.later_groups.get_or_create(("warm", schedule.in_v, num_stages), lambda: warm_up(links, num_stages))
    return links


def warm_up(links: Mapping[int, Links], num_stages: int) -> bool:
    """Send one message on each channel between two ranks; with NCCL, the first message creates the communicator.

    That blocks both ranks until the other one comes, so it must not happen within a step. All ranks of a pipeline must
    call this. Each follows the order of the stages, so that no circle of ranks waits.

    Returns:
        True, once all messages of this rank have arrived.
    """
    nothing = Links()
    for stage in range(num_stages - 1):
        here, after = links.get(stage, nothing), links.get(stage + 1, nothing)
        for sender, receiver in (
            (here.activations_out, after.activations_in),
            (after.gradients_out, here.gradients_in),
        ):
            if isinstance(sender, Channel):
                sender.warm_up(sends=True)
            if isinstance(receiver, Channel):
                receiver.warm_up(sends=False)
    return True
