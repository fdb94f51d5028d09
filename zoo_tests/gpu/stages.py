"""What `make gpu` measures of one GPU and of the links between several, each by itself: functions for a rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import single_device
from benchmarks.single_device import SHAPES, Step
from plugins.hybrid_parallel.planner.device import PRESETS
from plugins.hybrid_parallel.planner.link_benchmark import measure_axis

COLUMNS = [
    "model",
    "way",
    "tokens/s",
    "TFLOP/s",
    "of the chip's peak",
    "of the measured peak",
    "host ms",
    "idle",
    "GiB",
]
# Steps that look for values which are not finite wait for the device, which others do not do.
_OURS: dict[str, Any] = {"nonfinite": "ignore"}
COMPILED = {"compile_layers": True, **_OURS}
# Stage -> way -> options of ours; None for the ways of `single_device`.
WAYS: dict[str, dict[str, dict[str, Any] | None]] = {
    "speed": {"ours": _OURS, "plain": None, "compiled": None, "liger": None},
    "levers": {
        "compiled layers": COMPILED,
        "CUDA graphs": {**COMPILED, "cuda_graphs": True},
        "fp8, tensorwise": {**_OURS, "precision": "fp8"},
        "fp8, rowwise": {**_OURS, "precision": "fp8", "fp8_recipe": "rowwise"},
        "recomputation": {**_OURS, "gradient_checkpointing": "full"},
        "recomputation by operators": {**_OURS, "gradient_checkpointing": "operators"},
        "tiled MLP": {**_OURS, "tiled_mlp": True},
    },
}
# Largest first: an 8B's layers are what others publish.
MODELS = sorted(SHAPES, key=lambda name: "8B" not in name)
_SIZES = tuple(2**exponent for exponent in range(16, 29, 2))


def speed(name: str, way: str, options: dict[str, Any] | None, is_real: bool, steps: int = 8) -> list[Any]:
    """Train without waiting for steps; return a row of the table.

    Host milliseconds are until a step has been launched; idle is the share of a step in which no kernel runs.
    """
    shape, device = SHAPES[name], torch.device("cuda", 0)
    step = single_device.step_of(shape, way, device, is_real, options)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    host = (time.perf_counter() - start) / steps
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    tokens, work = single_device.work_of(shape, is_real)
    rate = work / seconds
    peak = next((PRESETS[each].flops["bf16"] for each in PRESETS if each in torch.cuda.get_device_name()), None)
    memory = torch.cuda.max_memory_allocated() / 2**30
    idle = 1 - _busy(step) / seconds
    del step
    gc.collect()
    shares = ["-" if peak is None else f"{rate / peak:.0%}", f"{rate / single_device.matmul_peak(device, is_real):.0%}"]
    return [name, way, f"{tokens / seconds:,.0f}", f"{rate / 1e12:.0f}", *shares, host * 1e3, f"{idle:.0%}", memory]


def _busy(step: Step, trace: str | None = None) -> float:
    """Return the seconds of kernels in one step; write its trace, for Perfetto, to a file."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(trace)
    return sum(each.self_device_time_total for each in profiler.key_averages()) / 1e6


def trace(name: str, path: str, is_real: bool) -> float:
    """Keep the trace of a step; return the seconds of its kernels."""
    step = single_device.step_of(SHAPES[name], "ours", torch.device("cuda", 0), is_real, _OURS)
    step()
    return _busy(step, path)


def bits(name: str, repeats: int, is_real: bool) -> str:
    """Compute the same step in bf16 again and again; name the first output or gradient that got other bits."""
    model = single_device.build(SHAPES[name], torch.device("cuda", 0), is_real).bfloat16().eval()
    torch.manual_seed(1)
    batch = single_device.batch_of(SHAPES[name], model, torch.device("cuda", 0), is_real)
    batch = {key: each.bfloat16() if each.is_floating_point() else each for key, each in batch.items()}
    seen: list[tuple[str, Tensor]] = []

    def look(path: str, module: nn.Module, args: Any, output: Any) -> None:
        seen.extend((path, _hash(each)) for each in _tensors(output))

    for path, module in model.named_modules():
        module.register_forward_hook(partial(look, path))
    for path, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, path=path: seen.append((f"gradient of {path}", _hash(grad))))
    first: list[int] = []
    for number in range(repeats):
        seen.clear()
        model(**batch).loss.backward()
        model.zero_grad()
        found = torch.stack([each for _, each in seen]).tolist()
        first = first or found
        changed = next((path for (path, _), one, two in zip(seen, first, found, strict=True) if one != two), None)
        if changed is not None:
            return f"pass {number + 1} of {repeats}: {changed or 'the model'} got other bits first"
    return f"{repeats} passes: the same bits, in {len(seen)} outputs and gradients"


def _tensors(output: Any) -> Iterator[Tensor]:
    values = output if isinstance(output, tuple | list) else getattr(output, "to_tuple", lambda: (output,))()
    return (each for each in values if isinstance(each, Tensor) and each.is_floating_point())


def _hash(x: Tensor) -> Tensor:
    values = x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).flatten().long()
    return (values * (1 + torch.arange(len(values), device=x.device) % 8191)).sum()


def links(is_real: bool) -> list[list[Any]]:
    """Return a row of bandwidth, in GB/s of what a rank sends, for each size of a message."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for size in _SIZES if is_real else _SIZES[:1]:
        found = measure_axis(dist.group.WORLD, device, sizes=(size,), repeats=7 if is_real else 1)
        rows.append([size >> 10, *(each.bus_bandwidth / 1e9 for each in found.collectives)])
    return rows
