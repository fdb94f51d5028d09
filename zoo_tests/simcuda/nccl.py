"""NCCL of the simulated device: what `cuda:nccl` of a process group is, by gloo on copies of the tensors.

An operation is a `Launch` in the queue of its communicator, which runs one after the other.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from zoo_tests.harness.c10d_operations import PLACES
from zoo_tests.simcuda import rules, runtime
from zoo_tests.simcuda.flight_record import Counter, dump
from zoo_tests.simcuda.work import Launch, Work, copy_of

BACKEND = "cpu:gloo,cuda:nccl"
# Those whose tensors may differ in size between ranks.
_UNEVEN = ("alltoall_", "alltoall_base_", "gather_", "scatter_", "barrier")
_WHOLE_GROUP = "all"
_POLL_S = 0.001
_VERSION = (2, 27, 0)


class SimulatedNCCL(ProcessGroupGloo):
    """What stands for `ProcessGroupNCCL`: a gloo group of its own, separate from that of CPU tensors."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
            self.global_ranks_in_group: list[int] = []
            self.group_name, self.split_from, self.split_color = "", None, 0
            self.config = SimpleNamespace()

    uid = -1

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        ranks = options.global_ranks_in_group or list(range(size))
        group = _Group(self, store, rank, size, f"{options.group_name} of ranks {ranks}")
        _GROUPS[options.group_name] = group
        self._counter = group.counter

    def _get_sequence_number_for_group(self) -> int:
        """NCCL counts collectives alone."""
        return self._counter.collectives

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Nothing: every wait has the limit of the rules."""


class _Group:
    """The communicators of a process group."""

    def __init__(self, backend: SimulatedNCCL, store: dist.Store, rank: int, size: int, name: str) -> None:
        self.backend, self.store, self.rank, self.size, self.name = backend, store, rank, size, name
        # CPU tensors of this group reach the gloo group of device tensors.
        self._inner = ProcessGroup(store, rank, size)
        self._inner._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        self.boxed = self._inner.boxed()
        self.communicators: dict[str, _Communicator] = {}
        self.generation = 0  # of communicators, the same on all ranks
        self.counter = Counter()

    def close(self) -> None:
        """Forget all communicators, on all ranks; the next operations make new ones."""
        for communicator in self.communicators.values():
            communicator.close()
        self.communicators, self.generation = {}, self.generation + 1

    def key(self, *parts: object) -> str:
        """A key of the store for the communicators of this generation."""
        return "/".join(map(str, ("simcuda", self.generation, *parts)))

    def communicator(self, is_bound: bool, peer: int | None = None) -> _Communicator:
        """The one of the whole group, or that for transfers between this rank and `peer`; made when first needed.

        Args:
            is_bound: whether the group has a device: then it has one communicator, made with the group.
            peer: a rank of the group.
        """
        if peer is None or is_bound:
            key, ranks = _WHOLE_GROUP, range(self.size)
        else:
            key, ranks = f"{min(self.rank, peer)}:{max(self.rank, peer)}", (self.rank, peer)
        if key not in self.communicators:
            if rules.is_on("lazy_communicators") and not is_bound:
                self._meet(key, ranks)
            self.communicators[key] = _Communicator(self, key)
        return self.communicators[key]

    def _meet(self, key: str, ranks: Sequence[int]) -> None:
        """Block until all of `ranks` are here."""
        self.store.set(self.key("meet", key, self.rank), "here")
        deadline = time.monotonic() + rules.settings.hangs_after_s
        missing = [rank for rank in ranks if rank != self.rank]
        while missing := [rank for rank in missing if not self.store.check([self.key("meet", key, rank)])]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self.rank} of group {self.name} makes communicator {key} at {runtime.source_line()}, and "
                    f"ranks {missing} never come: on GPUs this hangs"
                )
            time.sleep(_POLL_S)


class _Communicator:
    """Runs operations one after the other, in the order of their launches."""

    def __init__(self, group: _Group, key: str) -> None:
        self.group, self.key = group, key
        self._turns, self.stream = 0, torch.cuda.Stream()
        # Not a SimpleQueue, whose waits have no frame by which the failure monitor knows them.
        self._queue: queue.Queue[Launch | None] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def launch(self, launch: Launch) -> None:
        """Append an operation to the queue."""
        if not rules.is_on("one_queue"):
            launch.start()
        self._queue.put(launch)

    def agree(self, rule: str, signature: str) -> None:
        """Compare the next operation with that of the other ranks.

        Raises:
            RuntimeError: another rank launched something else in this turn.
        """
        turn, self._turns = self._turns, self._turns + 1
        if not rules.is_on(rule) or self.group.size == 1:
            return
        mine = f"{signature}\nrank {self.group.rank} at {runtime.source_line()}"
        first = self.group.store.compare_set(self.group.key("order", self.key, turn), "", mine).decode()
        theirs, _, who = first.partition("\n")
        if theirs != signature:
            raise RuntimeError(
                f"operation {turn} of communicator {self.key} of group {self.group.name} is {theirs} for {who}, and "
                f"{signature} for rank {self.group.rank} at {runtime.source_line()}"
            )

    def close(self) -> None:
        self._queue.put(None)

    def _serve(self) -> None:
        while (launch := self._queue.get()) is not None:
            launch.run()


_GROUPS: dict[str, _Group] = {}
_outstanding: list[Work] = []
_returned: deque[Work] = deque(maxlen=64)  # Python's half of a work must live until its caller holds it
_batch: list[tuple[_Communicator, Work]] | None = None  # of `batch_isend_irecv`, while it collects


def install(library: torch.library.Library) -> None:
    """Make this the NCCL of this process."""
    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = SimulatedNCCL, True
    torch.cuda.nccl.version = lambda: _VERSION
    torch._C._distributed_c10d._dump_nccl_trace_json = dump
    kernels = {name: _collective(name) for name in PLACES} | {"send": _send, "recv_": _receive}
    with warnings.catch_warnings(action="ignore"):  # that torch's own kernels are replaced
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CUDA", allow_override=True)
    dist.batch_isend_irecv = c10d.batch_isend_irecv = _batched(c10d.batch_isend_irecv)
    dist.destroy_process_group = c10d.destroy_process_group = _forgetting(c10d.destroy_process_group)
    runtime.listeners.append(_drain_where_asked)


def communicators() -> set[tuple[str, str]]:
    """The communicators that this rank has: (group, ranks in the group)."""
    return {(name, key) for name, group in _GROUPS.items() for key in group.communicators}


def drain(reason: str) -> None:
    """Wait until the device has nothing left to do.

    Raises:
        RuntimeError: an operation never ends.
    """
    for work in list(_outstanding):
        if not work.done.wait(rules.settings.hangs_after_s):
            raise RuntimeError(
                f"rank {dist.get_rank()} waits for the whole device in {runtime.source_line()} ({reason}) while "
                f"{work.what} of {work.line} waits for the other rank: on GPUs this hangs"
            )
        if work.error is None:
            work.deliver()
        work.let_go()
    _outstanding.clear()


def _drain_where_asked(kind: str, what: str) -> None:
    if kind == "kernel" and _outstanding:
        reason = rules.why_it_drains(what)
        if reason is not None:
            drain(reason)
    elif kind == "sync" and what == "device synchronize":
        drain(what)
    elif kind == "rules":
        _outstanding.clear()
        for group in _GROUPS.values():
            group.close()


# ----- the operators -----


def _collective(name: str) -> Callable:
    op = getattr(torch.ops.c10d, name).default
    names = [argument.name for argument in op._schema.arguments]
    at, roots = names.index("process_group"), names.index("root_rank") if "root_rank" in names else None
    written, read = PLACES[name]

    def run(*args: Any) -> Any:
        outer = ProcessGroup.unbox(args[at])
        if _is_fake(outer):
            works = op(*tree_map_only(Tensor, runtime.host, args))
            return (args[0], works[-1]) if isinstance(works, tuple) else works
        group, works_here = _group_of(outer), None if roots is None else args[roots] == outer.rank()
        outputs = [] if written is None else tree_leaves(args[written])
        inputs = tree_leaves(args[read])
        rules.check_tensors(name, [*inputs, *outputs])
        if (name == "broadcast_" and works_here) or (name == "reduce_" and not works_here):
            outputs = []  # its own tensor stays as it is
        if name == "barrier":
            runtime.tell("sync", "barrier")
        communicator = group.communicator(outer.bound_device_id is not None)
        first = (outputs or inputs)[0]
        size = "" if name in _UNEVEN else f" {first.dtype} {max(each.numel() for each in (*inputs, *outputs))}"
        communicator.agree("collective_order", f"{name}{size}")
        copies = {id(tensor): copy_of(tensor) for tensor in (*inputs, *outputs)}
        own = tree_map_only(Tensor, lambda tensor: copies[id(tensor)], args[:at])

        def start() -> Any:
            result = op(*own, group.boxed, *args[at + 1 :])
            return dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)

        what = f"{name} {first.dtype} {list(first.shape)}"
        work = Work(what, [start], [(tensor, copies[id(tensor)]) for tensor in outputs], inputs, communicator.stream)
        group.counter.note(name, outer.group_name, inputs, work)
        _launch(communicator, work)
        return (args[0], work.boxed()) if len(op._schema.returns) == 2 else work.boxed()

    return run


def _send(tensors: list[Tensor], boxed: Any, peer: int, tag: int) -> Any:
    return _transfer(tensors[0], boxed, peer, is_send=True)


def _receive(tensors: list[Tensor], boxed: Any, peer: int, tag: int) -> Any:
    return _transfer(tensors[0], boxed, peer, is_send=False)


def _transfer(tensor: Tensor, boxed: Any, peer: int, is_send: bool) -> Any:
    """Send to or receive from rank `peer` of a group; NCCL knows no tags."""
    outer = ProcessGroup.unbox(boxed)
    group = _group_of(outer)
    rules.check_tensors("send" if is_send else "recv", [tensor])
    communicator = group.communicator(outer.bound_device_id is not None, peer if _batch is None else None)
    source, target = (group.rank, peer) if is_send else (peer, group.rank)
    what = f"transfer {source} -> {target} of {tensor.dtype} {tensor.numel()}"
    if communicator.key != _WHOLE_GROUP:
        communicator.agree("p2p_order", what)
    copy, tag = copy_of(tensor), 4 if communicator.key == _WHOLE_GROUP else 2
    token = torch.zeros(1)
    # The one that receives tells the one that sends: a transfer ends when both have come.
    phases = [
        lambda: _on_gloo(group, copy, peer, tag, is_send),
        lambda: _on_gloo(group, token, peer, tag + 1, not is_send),
    ]
    written, read = ([], [tensor]) if is_send else ([(tensor, copy)], [])
    work = Work(what, phases, written, read, communicator.stream)
    group.counter.note("send" if is_send else "recv", outer.group_name, [tensor], work, is_transfer=True)
    _launch(communicator, work)
    return work.boxed()


def _on_gloo(group: _Group, tensor: Tensor, peer: int, tag: int, is_send: bool) -> Any:
    op = torch.ops.c10d.send if is_send else torch.ops.c10d.recv_
    return dist.Work.unbox(op([tensor], group.boxed, peer, tag))


def _launch(communicator: _Communicator, work: Work) -> None:
    for ended in [each for each in _outstanding if each.done.is_set()]:
        ended.let_go()
        _outstanding.remove(ended)
    _outstanding.append(work)
    _returned.append(work)
    if _batch is not None:
        _batch.append((communicator, work))
    else:
        communicator.launch(Launch([work]))


def _batched(native: Callable) -> Callable:
    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        """Transfers that start together, on the communicator of the whole group."""
        global _batch
        _batch = []
        try:
            works = native(operations)
        finally:
            collected, _batch = _batch, None
        if collected:
            collected[0][0].launch(Launch([work for _, work in collected]))
        return works

    return batch_isend_irecv


def _forgetting(native: Callable) -> Callable:
    def destroy_process_group(group: ProcessGroup | None = None) -> None:
        """End the threads of groups that are no more."""
        native(group)
        for name in set(_GROUPS) - set(c10d._world.pg_names.values()):
            _GROUPS.pop(name).close()

    return destroy_process_group


def _is_fake(group: ProcessGroup) -> bool:
    """Whether this is torch's group of one process that plays a rank of many: its operations do nothing."""
    return isinstance(group._get_backend(torch.device("cuda")), FakeProcessGroup)


def _group_of(group: ProcessGroup) -> _Group:
    if group.group_name not in _GROUPS:
        raise RuntimeError(f"group {group.group_name} has no NCCL, and got a tensor of the device")
    return _GROUPS[group.group_name]
