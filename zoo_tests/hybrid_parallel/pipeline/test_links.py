"""The first message of every link, and the calls of a step on CUDA, made over gloo.

What breaks here first: a link that is not warmed up, or a call in another place. Look in
`plugins/hybrid_parallel/pipeline/p2p.py`, and for calls within a step in `runtime.py` and `p2p.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.pipeline import p2p as links_module
from plugins.hybrid_parallel.pipeline.p2p import Channel, Links, PendingReceive, connect, warm_up
from plugins.hybrid_parallel.pipeline.runtime import PassState, PipelineRuntime
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.train_sharded import boost
from zoo_tests.hybrid_parallel.pipeline.host_programs import Call, Link, Step, host_programs
from zoo_tests.hybrid_parallel.pipeline.nccl_model import Rules, blocked_calls


def _channels(links: dict[int, Links]) -> Iterator[tuple[str, int, Channel]]:
    """Yield (what is sent, the lower stage, channel) for the channels to other ranks."""
    for stage, each in links.items():
        for what, lower, channel in (
            ("activations", stage - 1, each.activations_in),
            ("activations", stage, each.activations_out),
            ("gradients", stage, each.gradients_in),
            ("gradients", stage - 1, each.gradients_out),
        ):
            if isinstance(channel, Channel):
                yield what, lower, channel


# ----- the first messages -----


def _first_messages(name: str, rank: int, num_ranks: int, chunks: int) -> list[Call]:
    """Return the messages of the warm-up of one rank, without groups and devices."""
    mesh = SimpleNamespace(
        size=lambda axis: num_ranks,
        rank=lambda axis: rank,
        device=torch.device("cpu"),
        stage_ranks=range(num_ranks),
    )
    with patch.object(links_module, "link_group", lambda mesh, *link: link):
        links = connect(mesh, SCHEDULES[name], chunks)
    lower = {channel: stage for _, stage, channel in _channels(links)}
    outgoing = [channel for each in links.values() for channel in (each.activations_out, each.gradients_out)]
    calls: list[Call] = []

    def record(channel: Channel, sends: bool) -> None:
        assert sends == (channel in outgoing), "each direction has a connection of its own"
        ends = (rank, channel.peer) if sends else (channel.peer, rank)
        link = Link(channel.group, *ends, lower[channel])
        calls.extend([Call("send", link)] if sends else [Call("allocate", link), Call("receive", link)])

    with patch.object(Channel, "warm_up", record):
        warm_up(links, num_ranks * chunks)
    sent = [call.link for call in calls if call.kind != "allocate"]
    assert len(sent) == len(set(sent)) == len(lower), "each channel has one first message"
    return calls


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_links_are_warmed_up_without_a_deadlock(name: str) -> None:
    chunks = SCHEDULES[name].chunks or 3
    for num_ranks in range(1, 9):
        programs = [_first_messages(name, rank, num_ranks, chunks) for rank in range(num_ranks)]
        assert blocked_calls(programs, Rules("lazy", in_order=True, drains="calls")) == {}, num_ranks
        assert blocked_calls(programs, Rules("bound", in_order=True, drains="calls")) == {}, num_ranks


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
@distributed(3)
def test_the_first_messages_arrive(name: str) -> None:
    links = connect(build_mesh(3, 1, 1, 1), SCHEDULES[name], 2)
    for _ in range(2):
        assert warm_up(links, 6)
    for _, _, channel in _channels(links):
        channel.flush()


@distributed(2)
def test_links_are_warmed_up_on_cuda_once() -> None:
    mesh = replace(build_mesh(2, 1, 1, 1), device=torch.device("cuda", 0))
    mesh.later_groups.clear()
    with patch("torch.cuda.Stream"), patch.object(Channel, "warm_up", autospec=True) as first_message:
        made = connect(mesh, SCHEDULES["1f1b"], 1)
        assert [call.args[0] for call in first_message.call_args_list] == [each for _, _, each in _channels(made)]
        connect(mesh, SCHEDULES["gpipe"], 1)
        assert first_message.call_count == 2
        connect(mesh, SCHEDULES["interleaved"], 2)
        assert first_message.call_count == 2 + 6
    mesh.later_groups.clear()


# ----- the calls of a step -----


def _is_cpu_message(tensor: Tensor) -> bool:
    """Tell headers and numbers from what stages send to each other."""
    return tensor.dtype == torch.int64


@contextmanager
def _recording(runtime: PipelineRuntime, calls: list[Call], name: str) -> Iterator[None]:
    """Record the calls of steps in the words of the model, with the order of CUDA."""
    rank, num_ranks = runtime.mesh.rank("pp"), runtime.mesh.size("pp")
    schedule, link_of = SCHEDULES[name], {}
    for what, stage, channel in _channels(runtime.links):
        low, high = schedule.rank_of(stage, num_ranks), schedule.rank_of(stage + 1, num_ranks)
        ends = (low, high) if what == "activations" else (high, low)
        link_of[channel] = Link((what, stage // num_ranks, low < high), *ends, stage)
        channel.stream = MagicMock()
    inputs = {(link.group[0], link.stage): link for link in link_of.values() if link.target == rank}

    def before(owner: type, method: str, call_of: Any) -> Any:
        original = getattr(owner, method)

        def recorded(self: Any, *arguments: Any, **keywords: Any) -> Any:
            call = call_of(self, *arguments)
            calls.extend([call] if call is not None else [])
            return original(self, *arguments, **keywords)

        return patch.object(owner, method, recorded)

    def run(step: PassState, action: Action) -> Call:
        needed = {"F": ("activations", action.stage - 1), "W": ("", 0)}.get(
            action.kind.value, ("gradients", action.stage)
        )
        return Call("run", inputs.get(needed), action)

    def on_cpu(kind: str) -> Any:
        return lambda channel, tensor: Call(kind, link_of[channel]) if _is_cpu_message(tensor) else None

    def send(channel: Channel, tensor: Tensor) -> Call:
        return Call("send header" if _is_cpu_message(tensor) else "send", link_of[channel])

    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.current_stream"))
        stack.enter_context(patch("torch.cuda.stream", lambda stream: nullcontext()))
        for owner, method, call_of in (
            (PassState, "_around", run),
            (Channel, "_isend", send),
            (Channel, "irecv", on_cpu("receive header")),
            (PendingReceive, "__init__", lambda pending, message, channel, what: Call("allocate", link_of[channel])),
            (PendingReceive, "post", lambda pending: Call("receive", link_of[pending.channel])),
            (PipelineRuntime, "flush", lambda runtime: Call("flush")),
        ):
            stack.enter_context(before(owner, method, call_of))
        yield


@pytest.mark.parametrize("name", SCHEDULES)
@distributed(2)
def test_a_step_makes_the_calls_of_the_model(name: str) -> None:
    """Otherwise the model would prove nothing. Two training steps, an evaluation, a third training step."""
    options = {"pp_style": name, "num_microbatches": 3}
    case = Case(recipe=Recipe(family="gpt2", head="lm_head"), layout="pp2", options=tuple(options.items()))
    boosted = boost(case)
    runtime, calls = boosted.model.runtime, []
    batch = {key: value[:5] for key, value in case.recipe.batch(0).items()}
    sizes = 2, 2, 1  # samples of each micro-batch
    with _recording(runtime, calls, name):
        for trains in (True, True, False, True):
            optimizer = boosted.optimizer if trains else None
            boosted.booster.execute_pipeline(iter([batch]), boosted.model, optimizer=optimizer)
    steps = [Step(trains, sizes) for trains in (True, True, False, True)]
    program = host_programs(name, 2, runtime.num_chunks, steps)[runtime.mesh.rank("pp")]
    expected = [call for call in program if call.kind not in ("reduce", "synchronize")]
    assert calls == expected


@distributed(2)
def test_a_receive_on_cuda_waits_for_its_memory_and_for_no_later_kernel() -> None:
    """Its stream waits for the event of the allocation, and the post itself happens on that stream."""
    mesh = build_mesh(2, 1, 1, 1)
    links = connect(mesh, SCHEDULES["1f1b"], 1)
    message = (torch.arange(6.0).view(2, 3), None)
    if mesh.rank("pp") == 0:
        links[0].activations_out.send(message, ("key",))
        links[0].activations_out.flush()
        return
    channel, current, order = links[1].activations_in, MagicMock(), []
    channel.stream = MagicMock(wait_event=lambda event: order.append(event))
    current.record_event.side_effect = ["allocation", "later"]

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        assert stream is channel.stream
        order.append("begin")
        yield
        order.append("end")

    with (
        patch("torch.cuda.current_stream", lambda device: current),
        patch("torch.cuda.stream", on),
        patch.object(Channel, "irecv", autospec=True, side_effect=Channel.irecv) as irecv,
    ):
        pending = channel.prepare_receive(("key",), 0)
        assert irecv.call_count == 1 and order == [], "only the header is received"
        for _ in range(2):
            pending.post()
    assert order == ["allocation", "begin", "end"] and irecv.call_count == 2
    received = pending.wait()
    assert received[1] is None
    torch.testing.assert_close(received[0], message[0])
