"""Planted faults: each rule of the simulated device notices what it is there for, and lets the right code pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo_tests.harness.ranks import distributed, run_on_ranks, under_load
from zoo_tests.simcuda import rules

SOON_S = 1.0
# Rule -> the tests that break it, here and in test_streams.py; each also shows that without the rule nothing is said,
# or that what keeps it passes.
PLANTED = {
    "device_tensors": ["test_cpu_tensor"],
    "contiguous": ["test_tensor_that_is_not_contiguous"],
    "dtypes": ["test_dtype_that_nccl_lacks"],
    "lazy_communicators": ["test_communicator_made_where_the_peer_cannot_come"],
    "collective_order": ["test_collectives_in_another_order", "test_another_collective_of_the_same_size"],
    "p2p_order": ["test_transfers_in_another_order"],
    "one_queue": [
        "test_transfers_that_wait_for_each_other_in_one_queue",
        "test_transfers_of_a_bound_group_share_the_queue_of_its_collectives",
    ],
    "module_loading": ["test_first_launch_of_a_kernel_while_a_receive_is_posted"],
    "random_drains": ["test_wait_for_memory_while_a_receive_is_posted"],
    "poisoned_results": ["test_result_read_before_wait"],
    "inputs_unchanged": ["test_buffer_used_again_before_wait"],
    "late_copies": ["test_pinned_memory_read_before_the_copy_has_come"],
    "stream_order": [
        "test_tensor_read_on_another_stream_without_an_event",
        "test_event_recorded_too_early",
        "test_tensor_overwritten_while_another_stream_reads_it",
        "test_copies_between_streams",
        "test_collective_waited_for_on_another_stream",
        "test_collective_on_another_stream_than_its_tensor",
        "test_pipeline_whose_receives_do_not_wait_for_their_memory",
    ],
    "record_stream": ["test_memory_given_out_again_while_another_stream_uses_it"],
}


def on_device(*sizes: int, **options: Any) -> Tensor:
    return torch.ones(*sizes, device="cuda", **options)


def new_group(**options: Any) -> ProcessGroup:
    """A group of its own for each fault: what it leaves behind must not reach the next one."""
    return dist.new_group(timeout=timedelta(seconds=under_load(3)), **options)


def refusal_of(action: Callable[[], Any]) -> str:
    """What the device has against an action; empty if nothing."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def on_both(fault: Callable, *args: Any) -> list[str]:
    """The refusals on two ranks."""
    return run_on_ranks(2, fault, *args, device="simcuda", timeout_s=40)


# ----- what NCCL takes -----


@distributed(2, device="simcuda")
def test_cpu_tensor() -> None:
    gathered = [torch.zeros(2), torch.zeros(2)]
    assert "no tensor of the CPU" in refusal_of(lambda: dist.all_gather(gathered, on_device(2)))
    with rules.without("device_tensors"):
        dist.all_gather(gathered, on_device(2))
    assert gathered[0].tolist() == [1, 1]
    group = new_group(backend="nccl")
    assert "cpu" in refusal_of(lambda: dist.all_reduce(torch.ones(2), group=group))
    group = new_group(backend="gloo")
    assert "has no NCCL" in refusal_of(lambda: dist.all_reduce(on_device(2), group=group))


@distributed(2, device="simcuda")
def test_tensor_that_is_not_contiguous() -> None:
    assert "must be contiguous" in refusal_of(lambda: dist.all_reduce(on_device(2, 3).t()))
    with rules.without("contiguous"):
        dist.all_reduce(tensor := on_device(2, 3).t())
    assert tensor.sum().item() == 12


@distributed(2, device="simcuda")
def test_dtype_that_nccl_lacks() -> None:
    assert "no such dtype" in refusal_of(lambda: dist.broadcast(on_device(2, dtype=torch.int16), 0))
    with rules.without("dtypes"):  # gloo lacks it too, and says so
        assert "no such dtype" not in refusal_of(lambda: dist.broadcast(on_device(2, dtype=torch.int16), 0))


# ----- communicators and their order -----


def creates_before_telling(*active: str) -> str:
    """Rank 1 sends when it is told to, which rank 0 does after it has posted its receive."""
    group, told = new_group(), torch.zeros(1)
    with rules.only(*active, hangs_after_s=SOON_S):
        if dist.get_rank() == 1:
            dist.recv(told, 0)
            if not told.item():
                dist.send(on_device(2), 0, group=group)
            return ""
        received = torch.zeros(2, device="cuda")
        works: list[Any] = []
        refusal = refusal_of(lambda: works.append(dist.irecv(received, 1, group=group)))
        dist.send(told + bool(refusal), 1)
        for work in works:
            work.wait()
        assert refusal or received.sum().item() == 2
        return refusal


def test_communicator_made_where_the_peer_cannot_come() -> None:
    refusal, _ = on_both(creates_before_telling, "lazy_communicators")
    assert "ranks [1] never come" in refusal and "test_rules.py" in refusal
    assert on_both(creates_before_telling) == ["", ""]


def all_reduces(*sizes: int) -> str:
    group, size = new_group(), sizes[dist.get_rank()]
    with rules.only("collective_order"):
        refusal = refusal_of(lambda: dist.all_reduce(on_device(size), group=group, async_op=True))
    dist.barrier(group=dist.new_group(backend="gloo"))
    return refusal


def collectives_of_one_size(*active: str) -> str:
    """Both move four elements: rank 0 sums, rank 1 gathers."""
    group, four = new_group(), on_device(4)
    steps = [lambda: dist.all_reduce(four, group=group, async_op=True)]
    steps.append(lambda: dist.all_gather_into_tensor(four, on_device(2), group=group, async_op=True))
    with rules.only(*active):
        refusal = refusal_of(steps[dist.get_rank()])
    dist.barrier(group=dist.new_group(backend="gloo"))
    return refusal


def test_another_collective_of_the_same_size() -> None:
    refusals = on_both(collectives_of_one_size, "collective_order")
    assert sorted(map(bool, refusals)) == [False, True]
    assert "allreduce_" in "".join(refusals) and "_allgather_base_" in "".join(refusals)
    assert on_both(collectives_of_one_size) == ["", ""]


def test_collectives_in_another_order() -> None:
    refusals = on_both(all_reduces, 4, 5)
    assert sorted(map(bool, refusals)) == [False, True], "the rank that comes second is refused"
    assert "allreduce_ torch.float32 4" in "".join(refusals) and "allreduce_ torch.float32 5" in "".join(refusals)
    assert on_both(all_reduces, 4, 4) == ["", ""]


def both_send_first(mirrored: bool, *active: str) -> str:
    group, here, peer = new_group(), dist.get_rank(), 1 - dist.get_rank()
    received = torch.zeros(2, device="cuda")
    steps = [lambda: dist.isend(on_device(2), peer, group=group), lambda: dist.irecv(received, peer, group=group)]
    if mirrored and here == 1:
        steps.reverse()

    def exchange() -> None:
        for work in [step() for step in steps]:
            work.wait()
        assert received.sum().item() == 2

    with rules.only(*active, hangs_after_s=SOON_S):
        return refusal_of(exchange)


def test_transfers_in_another_order() -> None:
    refusals = on_both(both_send_first, False, "p2p_order")
    assert any("transfer 0 -> 1" in refusal and "transfer 1 -> 0" in refusal for refusal in refusals)
    assert on_both(both_send_first, True, *rules.DEFAULT) == ["", ""]


def test_transfers_that_wait_for_each_other_in_one_queue() -> None:
    refusals = on_both(both_send_first, False, "one_queue")
    assert all("did not end" in refusal for refusal in refusals)
    assert on_both(both_send_first, False) == ["", ""]


def bound_transfers(is_bound: bool) -> str:
    """Rank 0 posts the receive of what rank 1 sends last."""
    group, rank = new_group(), dist.get_rank()
    if is_bound:
        group.bound_device_id = torch.device("cuda", 0)
    received = torch.zeros(3, device="cuda")
    steps = [
        lambda: dist.irecv(received, 1, group=group) if rank == 0 else dist.isend(on_device(3), 0, group=group),
        lambda: dist.all_reduce(on_device(2), group=group, async_op=True),
    ]

    def exchange() -> None:
        for work in [step() for step in (steps if rank == 0 else reversed(steps))]:
            work.wait()

    with rules.only("one_queue", hangs_after_s=SOON_S):
        return refusal_of(exchange)


def test_transfers_of_a_bound_group_share_the_queue_of_its_collectives() -> None:
    assert all("did not end" in refusal for refusal in on_both(bound_transfers, True))
    assert on_both(bound_transfers, False) == ["", ""]


@distributed(2, device="simcuda")
def test_batched_transfers_start_together() -> None:
    peer, received = 1 - dist.get_rank(), torch.zeros(2, device="cuda")
    operations = [dist.P2POp(dist.isend, on_device(2), peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.sum().item() == 2


# ----- waits of the device -----


def kernel_before_telling(kernel: str, times: int, is_warm: bool, *active: str) -> str:
    """Rank 1 sends when it is told to, which rank 0 does after it has launched a kernel."""
    group, told = new_group(), torch.zeros(1)
    with rules.only("one_queue", *active, hangs_after_s=SOON_S):
        if dist.get_rank() == 1:
            dist.recv(told, 0)
            dist.send(on_device(2), 0, group=group)
            return ""
        received, x = torch.zeros(2, device="cuda"), on_device(2)
        if is_warm:
            getattr(x, kernel)()
        work = dist.irecv(received, 1, group=group)
        refusal = refusal_of(lambda: [getattr(x, kernel)() for _ in range(times)])
        dist.send(told, 1)
        work.wait()
        return refusal


def test_first_launch_of_a_kernel_while_a_receive_is_posted() -> None:
    refusal, _ = on_both(kernel_before_telling, "erfinv", 1, False, "module_loading")
    assert "the first launch of aten::erfinv" in refusal and "transfer 1 -> 0" in refusal
    assert on_both(kernel_before_telling, "erfinv", 1, True, "module_loading") == ["", ""]


def test_wait_for_memory_while_a_receive_is_posted() -> None:
    refusal, _ = on_both(kernel_before_telling, "exp", 200, True, "random_drains")
    assert "aten::exp Float waits for memory" in refusal
    assert on_both(kernel_before_telling, "exp", 200, True) == ["", ""]


# ----- results and inputs of what has not ended -----


@distributed(2, device="simcuda")
def test_result_read_before_wait() -> None:
    with rules.only("poisoned_results"):
        tensor = on_device(3)
        work = dist.all_reduce(tensor, async_op=True)
        assert tensor.isnan().all()
        work.wait()
        assert tensor.tolist() == [2, 2, 2]
        gathered = torch.zeros(2, 3, device="cuda")
        own = gathered[dist.get_rank()].fill_(dist.get_rank())
        work = dist.all_gather_into_tensor(gathered.view(-1), own, async_op=True)
        assert gathered[1 - dist.get_rank()].isnan().all() and not own.isnan().any(), "its own part is only read"
        work.wait()
        assert gathered.tolist() == [[0, 0, 0], [1, 1, 1]]
    with rules.only():
        work = dist.all_reduce(tensor, async_op=True)
        assert not tensor.isnan().any()
        work.wait()
    with rules.only("stream_order"):
        work = dist.all_reduce(tensor, async_op=True)
        assert "no event orders the two" in refusal_of(lambda: tensor + 1)
        work.wait()


@distributed(2, device="simcuda")
def test_buffer_used_again_before_wait() -> None:
    sent, received = on_device(3), on_device(3)
    peer, is_first = 1 - dist.get_rank(), dist.get_rank() == 0

    def fill_before_wait(value: float) -> str:
        work = dist.isend(sent, peer) if is_first else dist.irecv(received, peer)
        (sent if is_first else received).fill_(value)
        return refusal_of(work.wait)

    with rules.only("inputs_unchanged", "poisoned_results"):  # without poison results come when they like
        assert "was changed before its wait" in fill_before_wait(3)
    with rules.only("stream_order"):
        work = dist.isend(sent, peer) if is_first else dist.irecv(received, peer)
        assert "no event orders the two" in refusal_of(lambda: (sent if is_first else received).fill_(3))
        work.wait()
    with rules.only("poisoned_results"):
        assert not fill_before_wait(5)
    assert is_first or received.tolist() == [3, 3, 3], "what was sent is what it held when it was sent"


@distributed(1, device="simcuda")
def test_pinned_memory_read_before_the_copy_has_come() -> None:
    pinned = torch.empty(3, pin_memory=True)
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not torch.empty(3).is_pinned()
    pinned.copy_(on_device(3), non_blocking=True)
    assert pinned.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert pinned.tolist() == [1, 1, 1]
    with rules.without("late_copies"):
        assert pinned.copy_(on_device(3) * 2, non_blocking=True).tolist() == [2, 2, 2]


# ----- waits of the host -----


@distributed(2, device="simcuda")
def test_waits_of_the_host_are_counted() -> None:
    x = on_device(3)
    with rules.host_syncs() as found:
        x.sum().item()
        x.cpu()
        torch.empty(3).copy_(x, non_blocking=True)  # to memory that is not pinned
        torch.ones(3).to("cuda")
        torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
        torch.ones(3).to("cuda", non_blocking=True)
        x.nonzero()
        x[x > 0] = 2  # fills without a wait
        x[x > 0] = x
        torch.bincount(x.long())
        torch.cuda.synchronize()
        x.add_(1)
        dist.all_reduce(x)
    kinds = [each.partition(" at ")[0] for each in found]
    expected = [
        "item",
        "copy to the host",
        "copy to the host",
        "copy to the device",
        "aten::nonzero",
        "aten::_index_put_impl_ with a mask",
        "aten::bincount",
        "device synchronize",
    ]
    assert kinds == expected, found
    assert all("zoo_tests/simcuda/test_rules.py:" in each for each in found)
    with rules.sync_budget(1):
        x.sum().item()
    with (
        pytest.raises(RuntimeError, match=r"waited 2 times for the device, 1 allowed:\nitem at zoo_tests/.*"),
        rules.sync_budget(1),
    ):
        x.sum().item()
        x.sum().item()


# ----- names -----


def test_unknown_rule() -> None:
    with pytest.raises(ValueError, match="no rule of the simulated device is called in_order"), rules.only("in_order"):
        pass


def test_every_rule_is_described_and_has_planted_faults() -> None:
    assert [name for name in rules.ALL if f"- `{name}`: " not in rules.__doc__] == []
    assert set(PLANTED) == set(rules.ALL)
    tests = {name for place in ("test_rules.py", "test_streams.py") for name in names_of_tests(place)}
    assert {name for names in PLANTED.values() for name in names} <= tests


def names_of_tests(file: str) -> list[str]:
    return re.findall(r"^def (test_\w+)", (Path(__file__).parent / file).read_text(), re.MULTILINE)
