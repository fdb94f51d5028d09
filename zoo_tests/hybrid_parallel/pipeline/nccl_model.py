"""A model of hosts, CUDA streams and NCCL's communicators, which finds deadlocks of pipelines without a GPU.

A host makes its calls in order. A kernel starts when the earlier kernels of its stream and all that it depends on are
done. A send and its receive are done as soon as both have started. A host blocks while it waits for a header on the
CPU, creates a communicator whose other rank has not come yet, or waits for its device.

The model leaves out time, the number of kernels that a device can run at once, and what messages contain.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from random import Random

from zoo_tests.hybrid_parallel.pipeline.host_programs import Call, Link


@dataclass(frozen=True)
class Rules:
    """What the hosts and devices do.

    Attributes:
        communicators: "lazy": the first message of two ranks in a group creates their communicator, which blocks both
            hosts until the other one comes; "warm": all of these exist; "bound": the ranks have bound their devices,
            so each group has one communicator, and one stream, for all of its messages.
        in_order: whether a kernel starts only after all kernels that the host launched before it have started, as with
            `CUDA_DEVICE_MAX_CONNECTIONS=1`.
        drains: when a host waits for its whole device: "never", before the "first" action of each kind (loading of
            kernels), before all "actions" (autotuning), before all "calls" (`CUDA_LAUNCH_BLOCKING=1`; allocations that
            return memory), or before calls at "random".
        seed: seed of the random drains.
    """

    communicators: str = "warm"
    in_order: bool = False
    drains: str = "never"
    seed: int = 0


@dataclass(eq=False)
class _Kernel:
    """A kernel, with the number of kernels it still waits for, and those that wait for it.

    Attributes:
        partners: the kernels that must have started for this one to end, itself included; None while some are missing.
    """

    rank: int
    partners: list[_Kernel] | None
    missing: int = 0
    followers: list[_Kernel] = field(default_factory=list)
    started: bool = False
    done: bool = False


class _Devices:
    """The kernels of all ranks."""

    def __init__(self, num_ranks: int, in_order: bool) -> None:
        self._in_order = in_order
        self._tails: list[dict[Hashable, _Kernel]] = [{} for _ in range(num_ranks)]
        self._launched: list[deque[_Kernel]] = [deque() for _ in range(num_ranks)]  # not started, in order
        self._unmatched: defaultdict[Hashable, list[_Kernel]] = defaultdict(list)
        self._counts: defaultdict[Hashable, int] = defaultdict(int)
        self.outstanding = [0] * num_ranks

    def tail(self, rank: int, stream: Hashable) -> _Kernel | None:
        """Return the last kernel of a stream."""
        return self._tails[rank].get(stream)

    def launch(
        self, rank: int, stream: Hashable, needs: Sequence[_Kernel | None], group: tuple | None = None
    ) -> _Kernel:
        """Launch a kernel on a stream.

        Args:
            rank: the rank whose device runs it.
            stream: name of the stream.
            needs: kernels that must be done before it starts.
            group: (key, number of ranks) of a message or collective: the k-th kernels of these ranks end together.
        """
        kernel = _Kernel(rank, None)
        if group is None:
            kernel.partners = [kernel]
        else:
            self._match(kernel, *group)
        for need in {*needs, self.tail(rank, stream)} - {None}:
            if not need.done:
                need.followers.append(kernel)
                kernel.missing += 1
        self._tails[rank][stream] = kernel
        self.outstanding[rank] += 1
        self._launched[rank].append(kernel)
        self._progress([kernel])
        return kernel

    def _match(self, kernel: _Kernel, key: Hashable, size: int) -> None:
        """Join the k-th kernel of this rank with this key to the k-th ones of the other ranks."""
        self._counts[kernel.rank, key] += 1
        partners = self._unmatched[key, self._counts[kernel.rank, key]]
        partners.append(kernel)
        if len(partners) == size:
            for partner in partners:
                partner.partners = partners

    def _progress(self, changed: list[_Kernel]) -> None:
        """Start and end all kernels that can, after something changed for those in `changed`."""
        while changed:
            kernel = changed.pop()
            if not kernel.started and kernel.missing == 0:
                changed += self._start(kernel)
            if kernel.started and not kernel.done and kernel.partners and all(each.started for each in kernel.partners):
                for partner in kernel.partners:
                    partner.done = True
                    self.outstanding[partner.rank] -= 1
                    for follower in partner.followers:
                        follower.missing -= 1
                        changed.append(follower)

    def _start(self, kernel: _Kernel) -> list[_Kernel]:
        """Start a kernel, or those at the front of its rank's queue if the order counts; return the others started."""
        if not self._in_order:
            kernel.started = True
            return []
        queue, started = self._launched[kernel.rank], []
        while queue and queue[0].missing == 0:
            queue[0].started = True
            started.append(queue.popleft())
        return started


class _Model:
    def __init__(self, programs: Sequence[Sequence[Call]], rules: Rules) -> None:
        self.programs, self.rules = programs, rules
        self.positions = [0] * len(programs)
        self.devices = _Devices(len(programs), rules.in_order)
        self.headers: defaultdict[Link, int] = defaultdict(int)  # on their way
        self.announced: list[set[Hashable]] = [set() for _ in programs]  # communicators that a rank creates or has
        self.allocated: defaultdict[Link, deque[_Kernel | None]] = defaultdict(deque)
        self.received: defaultdict[Link, deque[_Kernel]] = defaultdict(deque)
        self.sends: list[list[_Kernel]] = [[] for _ in programs]
        self.used: list[set[object]] = [set() for _ in programs]
        self.random = Random(rules.seed)
        self.drains = [[self._drains(rank, call) for call in program] for rank, program in enumerate(programs)]

    def _drains(self, rank: int, call: Call) -> bool:
        if self.rules.drains == "calls":
            return True
        if self.rules.drains == "random":
            return self.random.random() < 0.2
        if call.action is None or self.rules.drains == "never":
            return False
        is_first = call.action.kind not in self.used[rank]
        self.used[rank].add(call.action.kind)
        return is_first or self.rules.drains == "actions"

    def run(self) -> None:
        progress = True
        while progress:
            progress = False
            for rank, program in enumerate(self.programs):
                while self.positions[rank] < len(program) and self._call(rank, program[self.positions[rank]]):
                    self.positions[rank] += 1
                    progress = True

    def _call(self, rank: int, call: Call) -> bool:
        """Make a call; return False if the host is blocked."""
        devices, compute = self.devices, self.devices.tail(rank, "compute")
        if self.drains[rank][self.positions[rank]] and devices.outstanding[rank]:
            return False
        match call.kind:
            case "run":
                message = [self.received[call.link].popleft()] if call.link is not None else []
                devices.launch(rank, "compute", message)
            case "send header":
                self.headers[call.link] += 1
            case "receive header":
                if not self.headers[call.link]:
                    return False
                self.headers[call.link] -= 1
            case "allocate":
                self.allocated[call.link].append(compute)
            case "send" | "receive":
                if not self._has_communicator(rank, call.link):
                    return False
                self._launch_message(rank, call)
            case "flush":
                devices.launch(rank, "compute", self.sends[rank])
                self.sends[rank] = []
            case "reduce":
                reduced = devices.launch(rank, "reduce", [compute], ("reduce", len(self.programs)))
                devices.launch(rank, "compute", [reduced])
            case "synchronize":
                return compute is None or compute.done
        return True

    def _has_communicator(self, rank: int, link: Link) -> bool:
        """Return whether the communicator exists; announce that this rank creates it."""
        self.announced[rank].add(self._communicator(link))
        other = link.target if rank == link.source else link.source
        return self.rules.communicators != "lazy" or self._communicator(link) in self.announced[other]

    def _communicator(self, link: Link) -> Hashable:
        if self.rules.communicators == "bound":
            return link.group
        return link.group, frozenset((link.source, link.target))

    def _launch_message(self, rank: int, call: Call) -> None:
        """Launch a send behind the kernels so far, or a receive behind those before its message was allocated."""
        is_send = call.kind == "send"
        need = self.devices.tail(rank, "compute") if is_send else self.allocated[call.link].popleft()
        kernel = self.devices.launch(rank, self._communicator(call.link), [need], (call.link, 2))
        if is_send:
            self.sends[rank].append(kernel)
        else:
            self.received[call.link].append(kernel)


def blocked_calls(programs: Sequence[Sequence[Call]], rules: Rules) -> dict[int, Call | None]:
    """Run the programs of all ranks and return the call in which each unfinished rank is blocked.

    Args:
        programs: the calls of each rank.
        rules: what hosts and devices do.

    Returns:
        For each rank that did not finish, the call in which it waits forever; None if only its device does. Empty if
        there is no deadlock.
    """
    model = _Model(programs, rules)
    model.run()
    blocked: dict[int, Call | None] = {}
    for rank, program in enumerate(programs):
        if model.positions[rank] < len(program):
            blocked[rank] = program[model.positions[rank]]
        elif model.devices.outstanding[rank]:
            blocked[rank] = None
    return blocked
