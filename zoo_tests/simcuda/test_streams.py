"""Rules of streams: work on one stream comes after that on another only if an event says so.

What breaks here first: an operator whose schema does not say what it writes, or memory that is given back by a way
that `streams.cpp` is not told of.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.pipeline import p2p
from zoo_tests.harness.ranks import distributed, run_on_ranks, stop_pools
from zoo_tests.simcuda import rules
from zoo_tests.simcuda.test_rules import new_group, on_device, refusal_of
from zoo_tests.simcuda.test_training import LAYOUTS, reference, train

UNORDERED = "no event orders the two"


def on(stream: torch.cuda.Stream, action: Callable[[], object]) -> str:
    """What the device has against an action on a stream."""
    with torch.cuda.stream(stream):
        return refusal_of(action)


@distributed(1, device="simcuda")
def test_tensor_read_on_another_stream_without_an_event() -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def read_after(wait: Callable[[], object]) -> str:
        x = on_device(4).mul_(2)
        wait()
        return on(side, lambda: x + 1)

    event = torch.cuda.Event()
    with rules.only("stream_order"):
        refusal = read_after(lambda: None)
        assert "aten::add on stream" in refusal and "aten::mul on stream 0 writes" in refusal and UNORDERED in refusal
        assert "zoo_tests/simcuda/test_streams.py:" in refusal
        assert UNORDERED in read_after(side.synchronize), "another stream"
        assert UNORDERED in read_after(lambda: main.wait_stream(side)), "the other way round"
        for wait in (
            lambda: side.wait_stream(main),
            lambda: side.wait_event(main.record_event()),
            lambda: (event.record(), event.synchronize()),
            main.synchronize,
            torch.cuda.synchronize,
            lambda: on_device(1).item(),  # the host waits for this stream
        ):
            assert not read_after(wait)
    with rules.only():
        assert not read_after(lambda: None)


@distributed(1, device="simcuda")
def test_event_recorded_too_early() -> None:
    side, x = torch.cuda.Stream(), on_device(4)
    early = torch.cuda.current_stream().record_event()
    x.mul_(2)
    side.wait_event(early)
    assert UNORDERED in on(side, lambda: x + 1)


@distributed(1, device="simcuda")
def test_tensor_overwritten_while_another_stream_reads_it() -> None:
    side, x = torch.cuda.Stream(), on_device(4, 4)
    side.wait_stream(torch.cuda.current_stream())
    assert not on(side, lambda: x[0].sum())
    assert not refusal_of(lambda: x.sum()), "both only read"
    assert not refusal_of(lambda: x[2:].zero_()), "other rows of the same memory"
    refusal = refusal_of(lambda: x[:2].zero_())
    assert "aten::zero_ on stream 0 writes memory that aten::sum" in refusal and UNORDERED in refusal
    torch.cuda.current_stream().wait_stream(side)
    x.zero_()


@distributed(1, device="simcuda")
def test_copies_between_streams() -> None:
    side, pinned = torch.cuda.Stream(), torch.ones(4, pin_memory=True)
    with torch.cuda.stream(side):
        copied = pinned.to("cuda", non_blocking=True)
    assert UNORDERED in refusal_of(lambda: copied + 1)
    assert UNORDERED in refusal_of(lambda: pinned.copy_(copied, non_blocking=True))
    assert UNORDERED in refusal_of(lambda: copied[0].item())


@distributed(1, device="simcuda")
def test_memory_given_out_again_while_another_stream_uses_it() -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def freed(before: Callable[[Tensor], object]) -> str:
        x = on_device(64)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.mul_(2)
        before(x)
        del x
        return refusal_of(lambda: on_device(64))

    refusal = freed(lambda x: None)
    assert "memory of stream 0 was freed and is given out again while aten::mul on stream" in refusal
    assert "use record_stream" in refusal
    assert not freed(lambda x: x.record_stream(side))
    assert not freed(lambda x: main.wait_stream(side))
    assert not freed(lambda x: side.synchronize())
    with rules.without("record_stream"):
        assert not freed(lambda x: None)


@distributed(2, device="simcuda")
def test_collective_waited_for_on_another_stream() -> None:
    side, main, x = torch.cuda.Stream(), torch.cuda.current_stream(), on_device(3)
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        assert not refusal_of(lambda: x.add_(1))
    assert UNORDERED in refusal_of(lambda: x + 1)
    main.wait_stream(side)
    assert x.tolist() == [3, 3, 3]


@distributed(2, device="simcuda")
def test_collective_on_another_stream_than_its_tensor() -> None:
    side, group, x = torch.cuda.Stream(), new_group(), on_device(3)
    refusal = on(side, lambda: dist.all_reduce(x, group=group))
    assert "allreduce_" in refusal and UNORDERED in refusal
    dist.barrier()


def train_forgetting(is_forgotten: bool, hangs_after_s: float) -> str:
    """Train a pipeline; receives may forget to wait for the stream that their memory was allocated on."""
    native = p2p.PendingReceive.__init__

    def forgetful(self: p2p.PendingReceive, *args: object) -> None:
        native(self, *args)
        self._allocated = torch.cuda.Event()

    warm = [rule for rule in rules.DEFAULT if rule != "lazy_communicators"]
    with mock.patch.object(p2p.PendingReceive, "__init__", forgetful if is_forgotten else native):
        refusal = refusal_of(lambda: train("llama", LAYOUTS["pp2"][1], tuple(warm), hangs_after_s))
    return refusal


def test_pipeline_whose_receives_do_not_wait_for_their_memory() -> None:
    assert run_on_ranks(2, train_forgetting, False, 30.0, device="simcuda", timeout_s=60) == ["", ""]
    refusals = run_on_ranks(2, train_forgetting, True, 3.0, device="simcuda", timeout_s=60)
    stop_pools()  # messages of the broken step are still under way
    assert any("transfer" in each and "its allocation" in each and UNORDERED in each for each in refusals), refusals


def train_on_a_side_stream(options: dict[str, object]) -> tuple[str, list[float]]:
    """Train where the user's current stream is another one than the default."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return train("llama", options)


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "dp2"])
def test_training_on_a_users_stream(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    for _, losses in run_on_ranks(world_size, train_on_a_side_stream, options, device="simcuda"):
        assert losses == pytest.approx(reference("llama"), rel=1e-5)
