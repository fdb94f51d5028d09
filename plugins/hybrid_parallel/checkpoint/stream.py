"""The weights of a boosted model as a stream: what `save_model` would write, a bucket of tensors at a time.

The ranks of a stage gather the tensors of a bucket from the replicas that share them (ZeRO stage 3), then from the
tensor- and expert-parallel ranks, and convert them to the layout of files. A broadcast brings them to the other stages.
On the way to one rank, each rank sends its shard to the rank of its stage that hands the whole to that one. While the
caller uses one bucket, the next one is on its way.

An optimizer that steps meanwhile leaves the stream as it was: what is still to come is first copied to host memory, of
each rank its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import failure
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.checks import refuse_bare_adapters
from plugins.hybrid_parallel.checkpoint.global_tensor import GlobalTensor, local_tensors, piece_of
from plugins.hybrid_parallel.checkpoint.peft import MergedAdapters, adapter_items, has_adapters
from plugins.hybrid_parallel.checkpoint.save import Item, cut_by_size, items_of, to_files
from plugins.hybrid_parallel.distributed.mesh import EP, HybridMesh
from plugins.hybrid_parallel.zero.stage3 import ShardedParameters
from shardformer.distributed.collectives import as_bytes
from shardformer.distributed.process_groups import ProcessGroups, all_gather_json, message_group
from shardformer.peft import model_inside
from shardformer.shard_spec import EXPERTS, TENSOR, ShardSpec, spec_of

_Steps = Generator[list[dist.Work], None, dict[str, Tensor]]
_IN_MEMORY = 4  # buckets: the one in use, the one that arrives, its shards, and their copies in another dtype
_ALIGNED = 16  # bytes to which the tensors of a bucket are aligned


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the memory of its bucket, from byte `start` on."""

    name: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The byte behind its last."""
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor in the memory of its bucket, [bytes]."""
        return memory[self.start : self.stop].view(self.dtype).view(self.shape)


class WeightStream:
    """Iterates over (name, whole tensor) of all stages; every rank iterates.

    Args:
        dtype: dtype of floating-point tensors; None for their own.
        size: bytes of memory beyond the model; a tensor larger than its quarter comes alone.
        to_rank: the rank that gets the tensors; None for all.
        merges: whether adapters are added to the weights of the base model, instead of coming alone.
    """

    def __init__(
        self,
        model: HybridParallelModel,
        mesh: HybridMesh,
        dtype: torch.dtype | None,
        size: int,
        to_rank: int | None = None,
        merges: bool = False,
    ) -> None:
        self.mesh, self._inside = mesh, model_inside(model.unwrap())
        self._model, self._dtype, self.to_rank = model, dtype, to_rank
        self._towards = None if to_rank is None else _ranks_towards(to_rank, mesh)
        self._merged = MergedAdapters(model) if merges and has_adapters(model.unwrap()) else None
        self.buckets = cut_by_size([*self._items()], size // _IN_MEMORY)
        self._kept: dict[Tensor, Tensor] = {}  # this rank's values before an optimizer changed them
        self._arriving: _Arrival | None = None
        self._begun = 0  # buckets of this stage that are gathered, or on their way

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._copy(lambda tensor: not isinstance(tensor, nn.Parameter))  # a forward changes running statistics
        with self._under_way(), self._before_updates(self._keep):
            yield from self._whole()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Refuse two streams in turns, if one goes to one rank: the loop of the others reads that to its end first.

        Raises:
            ConfigurationError: on the ranks that have both.
        """
        streams: list[WeightStream] = ProcessGroups.of_world().get_or_create("streams of weights", list)
        ranks = {each.to_rank for each in (*streams, self)} - {None}
        if streams and ranks:
            raise ConfigurationError(
                f"booster.weights(to_rank={min(ranks)}) and another stream of weights are read in turns, and the ranks "
                "that get no tensors read one to its end before the other begins; read them one after the other, or "
                "leave out to_rank"
            )
        streams.append(self)
        try:
            yield
        finally:
            streams.remove(self)

    @contextmanager
    def _before_updates(self, call: Callable[[], None]) -> Iterator[None]:
        hooks = [optimizer.before_update for optimizer in self._model.optimizers]
        for each in hooks:
            each.append(call)
        try:
            yield
        finally:
            for each in hooks:
                each.remove(call)

    def _keep(self) -> None:
        """Copy what has not been gathered yet, before an optimizer changes it."""
        if self._arriving is not None:
            self._arriving.finish()
        self._copy(lambda tensor: tensor.requires_grad)

    def _copy(self, changes: Callable[[Tensor], bool]) -> None:
        """Copy what changes, of what has not been gathered yet, to host memory."""
        for _, tensor in _tensors([*chain.from_iterable(self.buckets[self._begun :])]):
            for needed in self._read_for(tensor):
                if changes(needed) and needed not in self._kept:
                    self._kept[needed] = _own(needed, self._model.gathers.holder(needed)).to("cpu", copy=True)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        stages = all_gather_json([_described(bucket) for bucket in self.buckets], self.mesh.group("pp"))
        places = [(stage, index) for stage, buckets in enumerate(stages) for index in range(len(buckets))]
        coming = (_Arrival(self, *place, _slots(stages[place[0]][place[1]])) for place in places)
        seen: set[str] = set()
        self._arriving = next(coming, None)
        try:
            while self._arriving is not None:
                bucket, memory = self._arriving, self._arriving.finish()
                arriving = self._arriving = next(coming, None)
                for slot in bucket.slots:
                    # Every stage has the buffers of the whole model; one of them is enough.
                    if slot.name not in seen and self.to_rank in {None, dist.get_rank()}:
                        yield slot.name, slot.view(memory)
                    if arriving is not None:
                        arriving.advance()
                seen.update(slot.name for slot in bucket.slots)
                del bucket, memory
        except GeneratorExit:  # the caller has enough, and other ranks may not
            for each in chain([] if self._arriving is None else [self._arriving], coming):
                each.finish()
            raise

    def shards(self) -> Iterator[tuple[str, GlobalTensor]]:
        """Yield (name, this rank's rectangles); one that files hold in another form comes whole, from one rank."""
        begun = self._model.step_number
        for item in chain.from_iterable(self.buckets):
            if self._model.step_number != begun:
                raise ConfigurationError(
                    "booster.weights(shards=True) has yielded pieces of a step, and the optimizer has stepped since; "
                    "take all pieces before, or use shards=False, which goes on with the weights it began with"
                )
            if not item.unit.keeps_values:
                whole = _completed(self.gathered([item]))
                if all(spec_of(tensor).rank == 0 for tensor in item.tensors.values()):
                    yield from ((name, GlobalTensor.whole(tensor)) for name, tensor in whole.items())
                continue
            (tensor,), (in_file,) = item.tensors.values(), item.unit.file
            if self._merged is not None and self._merged.factors(tensor):
                (local,) = _completed(self._local([item])).values()
                piece = GlobalTensor.piece(spec_of(tensor), local)
            else:
                piece = piece_of(self._model, tensor)
            if spec_of(tensor).is_owner:
                parts = [replace(each, values=each.values.to(self._dtype_of(tensor))) for each in piece.rectangles]
                yield in_file, GlobalTensor(piece.shape, self._dtype_of(tensor), parts)

    # ----- what there is on this stage -----

    def _items(self) -> Iterator[Item]:
        if self._merged is not None:
            yield from items_of(self._inside, self._merged.tensors(), self._dtype)
        elif has_adapters(self._model.unwrap()):
            yield from adapter_items(self._model, self._dtype)
        else:
            refuse_bare_adapters(self._model.unwrap())
            yield from items_of(self._inside, local_tensors(self._model, unique=True), self._dtype)

    def gathered(self, items: Sequence[Item]) -> _Steps:
        """Gather items for the ranks that take them: yield what to wait for; return name in files -> tensor."""
        local = yield from self._local(items)
        shards, works, takers = {}, [], self._takers("pp")
        for name, tensor in _tensors(items):
            if name in local:
                spec = spec_of(tensor)
                shards[name], started = _from_ranks(local.pop(name), spec, self.mesh.group(spec.axis), takers)
                works += started
        yield works
        found: dict[str, Tensor] = {}
        for item in items if self.takes("pp") else ():
            full = {name: spec_of(tensor).assemble(shards.pop(name)) for name, tensor in item.tensors.items()}
            found |= to_files(self._inside, item.unit, full)
        return found

    def _local(self, items: Sequence[Item]) -> _Steps:
        """Gather shards from the replicas that share them; return name in memory -> shard, [local shape], if taken."""
        values: dict[Tensor, Tensor] = {}
        works: list[dist.Work] = []
        for _, tensor in _tensors(items):
            for needed in self._read_for(tensor):
                holder = self._model.gathers.holder(needed)
                own = self._kept.get(needed, _own(needed, holder)).to(self.mesh.device)
                values[needed], started = _from_replicas(needed, own, holder, self._takers(spec_of(tensor).axis))
                works += started
        yield works
        return {
            name: (values[tensor] if self._merged is None else self._merged.add(tensor, values)).to(
                self._dtype_of(tensor)
            )
            for name, tensor in _tensors(items)
            if self.takes(spec_of(tensor).axis)
        }

    def _takers(self, axis: str) -> Collection[int] | None:
        """Return the ranks that take whole tensors ("pp"), or shards of those of an axis; None for all."""
        return None if self._towards is None else self._towards[axis]

    def takes(self, axis: str) -> bool:
        """Whether this rank is one of them."""
        return self._towards is None or dist.get_rank() in self._towards[axis]

    def _read_for(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of this rank that a tensor of the files is made of."""
        return tensor, *(self._merged.factors(tensor) if self._merged is not None else ())

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype


class _Arrival:
    """A bucket on its way to this rank; `advance` waits for what has been started, and starts what follows.

    Args:
        stage, index: the stage that has it, and its place there.
    """

    def __init__(self, stream: WeightStream, stage: int, index: int, slots: Sequence[Slot]) -> None:
        self.slots = slots
        device = stream.mesh.device
        self._size = slots[-1].stop if slots else 0
        # A rank gets the tensors, or hands those of its stage to the rank that does.
        is_needed = stream.to_rank in {None, dist.get_rank()} or stage == stream.mesh.rank("pp")
        size = self._size if stream.takes("pp") and is_needed else 0
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._steps, self._works, self._is_complete = self._run(stream, stage, index), [], False
        # What the caller computes meanwhile does not wait for messages.
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self.advance()

    def advance(self) -> None:
        """Go on as far as the next messages."""
        with failure.guard("booster.weights"), torch.no_grad(), torch.cuda.stream(self._stream):
            for work in self._works:
                work.wait()
            self._works = next(self._steps, None) or []

    def finish(self) -> Tensor:
        """Wait until the bucket is here, and return its memory, [bytes]."""
        while not self._is_complete:
            self.advance()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._memory.record_stream(torch.cuda.current_stream())
        return self._memory

    def _run(self, stream: WeightStream, stage: int, index: int) -> Iterator[list[dist.Work]]:
        if stage == stream.mesh.rank("pp"):
            stream._begun = index + 1
            found = yield from stream.gathered(stream.buckets[index])
            for slot in self.slots if found else ():
                slot.view(self._memory).copy_(found.pop(slot.name))
        else:  # all stages broadcast at the same turn of the loop, whose body may send over the pipeline, too
            yield from ([], [])
        if stream.mesh.size("pp") > 1 and stream.takes("pp") and self._size:
            takers = None if stream.to_rank is None else {stream.to_rank}
            yield _bring(self._memory, stage, stream.mesh.group("pp"), takers)
        self._is_complete = True


def _tensors(items: Sequence[Item]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in memory, tensor)."""
    for item in items:
        yield from item.tensors.items()


@torch.no_grad()
def _completed(steps: _Steps) -> dict[str, Tensor]:
    """Run a gather to its end, and return what it found."""
    while True:
        try:
            works = next(steps)
        except StopIteration as end:
            return end.value
        for work in works:
            work.wait()


def _described(bucket: Sequence[Item]) -> list[list]:
    """Return [name, dtype, shape] of all tensors, as JSON can hold it."""
    return [
        [name, str(dtype).removeprefix("torch."), list(shape)]
        for item in bucket
        for name, (dtype, shape) in item.unit.file.items()
    ]


def _slots(described: Sequence[Sequence]) -> list[Slot]:
    """Place tensors one behind another."""
    found, start = [], 0
    for name, dtype, shape in described:
        found.append(Slot(name, start, getattr(torch, dtype), tuple(shape)))
        start = -(-found[-1].stop // _ALIGNED) * _ALIGNED
    return found


def _own(tensor: Tensor, holder: ShardedParameters | None) -> Tensor:
    """Return what this rank has of a tensor: its shard, [local shape], or its slice of that."""
    return tensor.detach() if holder is None else holder.own_slice(tensor)[2]


def _ranks_towards(to_rank: int, mesh: HybridMesh) -> dict[str, set[int]]:
    """Return who takes what on the way to a rank: "pp" -> of whole tensors, one rank of a stage; axis -> of shards."""
    grid = mesh.device_mesh.mesh  # [pp, dp, cp, tp]
    _, dp, cp, tp = (grid == to_rank).nonzero()[0].tolist()
    replicas = grid.flatten(1, 2)  # [pp, dp * cp, tp]
    replica = dp * grid.shape[2] + cp
    first = replica - replica % mesh.size(EP)  # of the neighbours that have all experts together
    found = {"pp": grid[:, dp, cp, tp], TENSOR: grid[:, dp, cp], EXPERTS: replicas[:, first : first + mesh.size(EP)]}
    return {axis: set(ranks.flatten().tolist()) for axis, ranks in found.items()}


def _from_replicas(
    tensor: Tensor, own: Tensor, holder: ShardedParameters | None, takers: Collection[int] | None
) -> tuple[Tensor, list[dist.Work]]:
    """Start to gather a tensor from the replicas that share it; return where it arrives, [local shape]."""
    if holder is None:
        return own, []
    flat = torch.empty(tensor.numel(), dtype=own.dtype, device=own.device)
    works = []
    for rank in range(dist.get_world_size(holder.options.shard_group)):
        part = holder.slice_on(rank, tensor)
        place = flat[part.start : part.stop]
        if rank == holder.rank:
            place.copy_(own)
        if len(place):
            works += _bring(place, rank, holder.options.shard_group, takers)
    return flat.view(tensor.shape), works


def _from_ranks(
    local: Tensor, spec: ShardSpec, group: dist.ProcessGroup, takers: Collection[int] | None
) -> tuple[list[Tensor], list[dist.Work]]:
    """Start to gather the shards of all ranks of a group; return where they arrive, in rank order."""
    if spec.dim is None:
        return [local], []
    shapes = [spec.on_rank(rank).local_shape for rank in range(spec.world_size)]
    shards = [local.contiguous() if rank == spec.rank else local.new_empty(each) for rank, each in enumerate(shapes)]
    works = (_bring(shard.view(-1), rank, group, takers) for rank, shard in enumerate(shards) if shard.numel())
    return shards, [*chain.from_iterable(works)]


def _bring(flat: Tensor, source: int, group: dist.ProcessGroup, takers: Collection[int] | None) -> list[dist.Work]:
    """Start to bring [size] from a rank of a group to all, or to the one that takes it.

    It travels as bytes: no backend supports all dtypes.
    """
    if takers is None:
        return [dist.broadcast(as_bytes(flat), group=group, group_src=source, async_op=True)]
    group, own = message_group(group), dist.get_rank(group)
    if own != source:
        return [dist.irecv(as_bytes(flat), group=group, group_src=source)] if dist.get_rank() in takers else []
    targets = [index for index, rank in enumerate(dist.get_process_group_ranks(group)) if rank in takers]
    return [dist.isend(as_bytes(flat), group=group, group_dst=target) for target in targets if target != own]
