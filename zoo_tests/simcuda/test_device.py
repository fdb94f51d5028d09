"""The simulated device itself: memory, random numbers, operators, and what is said where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zoo_tests.harness.ranks import distributed
from zoo_tests.simcuda import build, runtime
from zoo_tests.simcuda.test_rules import on_device, refusal_of


@distributed(1, device="simcuda")
def test_tensors_of_two_devices() -> None:
    assert "same device" in refusal_of(lambda: on_device(2) + torch.ones(2))
    runtime.lib.simcuda_set_device(1)  # as `torch.cuda.set_device` does on a machine of two
    refusal = refusal_of(lambda: torch.ones(2, device="cuda:0"))
    runtime.lib.simcuda_set_device(0)
    assert "this process trains on cuda:1, and a tensor is made on cuda:0" in refusal
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


@distributed(1, device="simcuda")
def test_depthwise_convolution() -> None:
    values = [torch.arange(8.0).reshape(1, 2, 4), torch.tensor([[[1.0, 2.0]], [[3.0, 5.0]]])]
    results = []
    for device in ("cpu", "cuda"):
        signal, kernel = (value.detach().to(device).requires_grad_() for value in values)
        torch.nn.functional.conv1d(signal, kernel, padding=1, groups=2).square().sum().backward()
        assert kernel.grad.device.type == device
        results.append((signal.grad.tolist(), kernel.grad.tolist()))
    assert results[0] == results[1]


# ----- what cannot be built -----


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler, and there is none of c\+\+, g\+\+, clang\+\+"):
        build.library()


def test_torch_with_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        RuntimeError, match=r"has CUDA kernels, .* cannot replace; install a CPU build of torch, or run"
    ):
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


def test_compiler_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "_LIMIT_S", 0.3)
    with pytest.raises(RuntimeError, match=r"was not compiled within 0.3 s; try again on a quieter machine"):
        build.library()


def test_this_process_has_no_device() -> None:
    assert runtime.lib is None and not torch.cuda.is_initialized()
