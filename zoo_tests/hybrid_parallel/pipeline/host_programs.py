"""What the host of each pipeline rank calls in several steps, as `PassState.execute` does, for `nccl_model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind
from plugins.hybrid_parallel.pipeline.timeline import order_messages


class Link(NamedTuple):
    """One direction between two neighbouring stages of two ranks.

    Attributes:
        group: the process group it uses.
        source, target: ranks.
        stage: the lower of the two stages.
    """

    group: tuple[str, int, bool]
    source: int
    target: int
    stage: int


class Call(NamedTuple):
    """One call of a host.

    Attributes:
        kind: "run", "allocate" (of a message to receive), "receive", "send", "send header", "receive header" (both on
            the CPU), "flush", "reduce" (a collective of all ranks), or "synchronize".
        link: the link of a message; of "run", the link whose message it needs.
        action: the action of "run".
    """

    kind: str
    link: Link | None = None
    action: Action | None = None


@dataclass(frozen=True)
class Step:
    """A step: whether it trains, and the signature of each micro-batch."""

    trains: bool
    signatures: tuple[int, ...]


@dataclass
class Host:
    """The calls of one rank so far.

    Attributes:
        name: name of the schedule.
        rank, num_ranks, num_chunks: of the pipeline.
        calls: the calls.
    """

    name: str
    rank: int
    num_ranks: int
    num_chunks: int
    calls: list[Call] = field(default_factory=list)
    _known: set[tuple] = field(default_factory=set)  # messages whose header was sent or received
    _numbered: set[tuple] = field(default_factory=set)  # links that sent or received this step's number
    _ready: set[Action] = field(default_factory=set)  # actions whose message is allocated
    _posted: set[Action] = field(default_factory=set)
    _ran: set[tuple[int, int]] = field(default_factory=set)  # (stage, micro-batch) that went forward

    def begin_step(self) -> None:
        """Forget what belongs to one step."""
        for each in (self._numbered, self._ready, self._posted, self._ran):
            each.clear()

    def input_of(self, action: Action) -> Link | None:
        """Return the link on which the message of an action arrives; None if it needs none from another rank."""
        if action.kind is Kind.FORWARD:
            return self._link("activations", action.stage - 1)
        return self._link("gradients", action.stage) if action.kind is not Kind.BACKWARD_WEIGHT else None

    def _output_of(self, action: Action) -> Link | None:
        if action.kind is Kind.FORWARD:
            return self._link("activations", action.stage)
        return self._link("gradients", action.stage - 1) if action.kind is not Kind.BACKWARD_WEIGHT else None

    def _link(self, what: str, stage: int) -> Link | None:
        if not 0 <= stage < self.num_ranks * self.num_chunks - 1:
            return None
        low, high = (SCHEDULES[self.name].rank_of(each, self.num_ranks) for each in (stage, stage + 1))
        if low == high:
            return None
        ends = (low, high) if what == "activations" else (high, low)
        return Link((what, stage // self.num_ranks, low < high), *ends, stage)

    def knows(self, action: Action, step: Step) -> bool:
        """Return whether the message of an action can be allocated without waiting for its sender."""
        link = self.input_of(action)
        if action.kind is not Kind.FORWARD:
            return (action.stage, action.microbatch) in self._ran
        numbered = link in self._numbered or not step.trains
        return numbered and (link, step.trains, step.signatures[action.microbatch]) in self._known

    def allocate(self, action: Action, step: Step) -> None:
        """Allocate the message of an action; wait for the header of an unknown one."""
        if action in self._ready:
            return
        link = self.input_of(action)
        self._header("receive header", link, action, step)
        self._ready.add(action)
        self.calls.append(Call("allocate", link))

    def receive(self, action: Action, step: Step) -> None:
        """Post the receive of the message of an action."""
        self.allocate(action, step)
        if action not in self._posted:
            self._posted.add(action)
            self.calls.append(Call("receive", self.input_of(action)))

    def run(self, action: Action) -> None:
        """Run an action, without sending its result."""
        self.calls.append(Call("run", self.input_of(action), action))
        self._ran.add((action.stage, action.microbatch))

    def send(self, action: Action, step: Step) -> None:
        """Send the result of an action, if another rank needs it."""
        link = self._output_of(action)
        if link is not None:
            self._header("send header", link, action, step)
            self.calls.append(Call("send", link))

    def _header(self, kind: str, link: Link, action: Action, step: Step) -> None:
        """Send or receive the number of a step and a header, where they are due; gradients have neither."""
        if action.kind is not Kind.FORWARD:
            return
        if step.trains and link not in self._numbered:
            self._numbered.add(link)
            self.calls.append(Call(kind, link))
        message = link, step.trains, step.signatures[action.microbatch]
        if message not in self._known:
            self._known.add(message)
            self.calls.append(Call(kind, link))


Tables = Sequence[Sequence[Action]]
Writer = Callable[[Sequence[Host], Tables, Step], None]


def in_message_order(hosts: Sequence[Host], tables: Tables, step: Step) -> None:
    """Add the calls of one step in the order of `order_messages`, as `PassState.execute` does on CUDA."""
    for host, turns in zip(hosts, order_messages(tables), strict=True):
        for position, turn in enumerate(turns):
            for action in turn.before_action:
                host.receive(action, step)
            later = turns[position + 1].before_action if position + 1 < len(turns) else ()
            for action in (*turn.before_send, *later):
                if not host.knows(action, step):
                    break
                host.allocate(action, step)
            host.run(turn.action)
            for action in turn.before_send:
                host.receive(action, step)
            host.send(turn.action, step)


def one_ahead(hosts: Sequence[Host], tables: Tables, step: Step) -> None:
    """Add the calls of one step in which each rank posts the receive of its next action before the current action."""
    for host, table in zip(hosts, tables, strict=True):
        for action, following in zip(table, [*table[1:], None], strict=True):
            if host.input_of(action) is not None:
                host.receive(action, step)
            if following is not None and host.input_of(following) is not None and host.knows(following, step):
                host.receive(following, step)
            host.run(action)
            host.send(action, step)


def host_programs(
    name: str, num_ranks: int, num_chunks: int, steps: Iterable[Step], write: Writer = in_message_order
) -> list[list[Call]]:
    """Return the calls of each rank in `steps`.

    Args:
        name: name of the schedule.
        num_ranks: number of ranks of the pipeline.
        num_chunks: number of stages per rank.
        steps: the steps; each ends with a collective of all ranks, and a training step with a synchronization.
        write: adds the calls of one step.
    """
    hosts = [Host(name, rank, num_ranks, num_chunks) for rank in range(num_ranks)]
    for step in steps:
        schedule = SCHEDULES[name]
        make = schedule.actions if step.trains else schedule.forward_only
        tables = [make(rank, num_ranks, len(step.signatures), num_chunks) for rank in range(num_ranks)]
        for host in hosts:
            host.begin_step()
        write(hosts, tables, step)
        for host in hosts:
            host.calls += [Call("flush"), Call("reduce"), *([Call("synchronize")] if step.trains else [])]
    return [host.calls for host in hosts]
