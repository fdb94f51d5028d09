"""Planted faults: each rule of the simulated device notices what it is there for, and lets the right code pass."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.simcuda import build, rules, runtime

SOON_S = 1.0


def on_device(*sizes: int, **options: Any) -> Tensor:
    return torch.ones(*sizes, device="cuda", **options)


def new_group(**options: Any) -> ProcessGroup:
    """A group of its own for each fault: what it leaves behind must not reach the next one."""
    return dist.new_group(timeout=timedelta(seconds=3), **options)


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


@distributed(2, device="simcuda")
def test_buffer_used_again_before_wait() -> None:
    sent, received = on_device(3), on_device(3)
    peer, is_first = 1 - dist.get_rank(), dist.get_rank() == 0
    work = dist.isend(sent, peer) if is_first else dist.irecv(received, peer)
    (sent if is_first else received).fill_(3)
    assert "was changed before its wait" in refusal_of(work.wait)
    with rules.without("inputs_unchanged"):
        work = dist.isend(sent, peer) if is_first else dist.irecv(received, peer)
        (sent if is_first else received).fill_(3)
        work.wait()
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


# ----- what holds always -----


@distributed(1, device="simcuda")
def test_tensors_of_two_devices() -> None:
    assert "same device" in refusal_of(lambda: on_device(2) + torch.ones(2))
    assert (on_device(2) + torch.tensor(1.0)).tolist() == [2, 2], "a number of the CPU is allowed"
    layer = torch.nn.Linear(2, 2).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(on_device(2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = state["step"].cpu()
    assert refusal_of(optimizer.step)


@distributed(1, device="simcuda")
def test_random_numbers_are_of_the_device() -> None:
    state = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    drawn = [torch.rand(3, device="cuda"), torch.nn.functional.dropout(on_device(9)), torch.randperm(5, device="cuda")]
    assert torch.equal(torch.get_rng_state(), state), "the CPU's generator stays where it is"
    torch.cuda.set_rng_state(before)
    for one, other in zip(
        drawn,
        [torch.rand(3, device="cuda"), torch.nn.functional.dropout(on_device(9)), torch.randperm(5, device="cuda")],
        strict=True,
    ):
        assert torch.equal(one, other)
    own = torch.Generator("cuda")
    own.manual_seed(5)
    assert torch.equal(torch.rand(3, device="cuda", generator=own), drawn[0])
    assert own.device.type == "cuda"


@distributed(1, device="simcuda")
def test_streams_events_and_memory() -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != main
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        (x := on_device(64, 64) @ on_device(64, 64)).record_stream(side)
        end.record()
    main.wait_event(end)
    assert torch.cuda.current_stream() == main and begin.elapsed_time(end) > 0
    del x
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(1000, device="cuda")
    assert x.isnan().all(), "fresh memory is poisoned"
    assert torch.cuda.memory_allocated() >= before + 4000 and torch.cuda.max_memory_allocated() >= before + 4000
    del x
    assert torch.cuda.memory_allocated() < before + 4000


@distributed(1, device="simcuda")
def test_operators_that_the_cpu_lacks_in_some_dtype() -> None:
    ids = torch.tensor([1, 2, 2, 3], device="cuda", dtype=torch.int32)
    counts = torch.histc(ids, bins=4, min=0, max=3)
    assert counts.tolist() == [0, 1, 2, 1] and counts.dtype == torch.int32 and counts.is_cuda
    torch.add(on_device(2, 3), on_device(2, 3), out=(out := torch.empty(0, device="cuda")))
    assert out.tolist() == [[2, 2, 2], [2, 2, 2]]


# ----- names, and what cannot be built -----


def test_unknown_rule() -> None:
    with pytest.raises(ValueError, match="no rule of the simulated device is called in_order"), rules.only("in_order"):
        pass


def test_every_rule_is_described() -> None:
    assert [name for name in rules.ALL if f"- `{name}`: " not in rules.__doc__] == []


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler, and there is none of c\+\+, g\+\+, clang\+\+"):
        build.library()


def test_headers_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'device.cpp:1: error: no member named allocate' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=rf"does not fit the headers of torch {torch.__version__[:4]}.*no member"):
        build.library()
    assert not list((tmp_path / "simcuda").glob("*.so")), "nothing half built stays behind"


def test_this_process_has_no_device() -> None:
    assert runtime.lib is None and not torch.cuda.is_initialized()
