"""What the stages of `make gpu` measure: functions for a rank, with real sizes on GPUs and tiny ones elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from benchmarks import single_device
from benchmarks.single_device import SHAPES, Step
from plugins.hybrid_parallel.planner.calibrate import measure_axis
from plugins.hybrid_parallel.planner.device import PRESETS
from zoo_tests.gpu.training import FP32, train

COLUMNS = ["tokens/s", "TFLOP/s", "of the chip's peak", "of the measured peak", "host ms", "idle", "GiB"]
# Steps that look for values which are not finite wait for the device, which others do not do.
_OURS: dict[str, Any] = {"nonfinite": "ignore"}
_COMPILED = {**_OURS, "compile_layers": True}
_TP = {**_COMPILED, "tp_size": 2, "enable_sequence_parallelism": True}
_PACKED = {**_OURS, "packed": True}
# Stage -> way -> options of ours; None for the ways of `single_device`.
WAYS: dict[str, dict[str, dict[str, Any] | None]] = {
    "speed": {"ours": _OURS, "plain": None, "compiled": None, "liger": None},
    "levers": {
        "ours": _OURS,
        "compiled layers": _COMPILED,
        "CUDA graphs": {**_COMPILED, "cuda_graphs": True},
        "fp8, tensorwise": {**_OURS, "precision": "fp8"},
        "fp8, rowwise": {**_OURS, "precision": "fp8", "fp8_recipe": "rowwise"},
        "mxfp8": {**_OURS, "precision": "fp8", "fp8_recipe": "mxfp8"},
        "recomputation": {**_OURS, "gradient_checkpointing": "full"},
        "recomputation by operators": {**_OURS, "gradient_checkpointing": "operators"},
        "tiled MLP": {**_OURS, "tiled_mlp": True},
        "packed rows, SDPA": {**_PACKED, "enable_flash_attention": "sdpa"},
        "packed rows, varlen": {**_PACKED, "enable_flash_attention": "flash_varlen"},
        "tp2": {**_TP, "enable_sequence_overlap": False},
        "tp2, asynchronous": {**_TP, "enable_sequence_overlap": True},
        "tp2, not compiled": {**_TP, "compile_layers": False},
        "tp2, not compiled, fp8": {**_TP, "compile_layers": False, "precision": "fp8"},
    },
    "rivals": {"torchtitan": None, "automodel": None},
}
# One H100 took longer with compiled layers: host milliseconds and idle share tell whether it waited for the host.
SLOWER_COMPILED = [(name, way) for name in ("GPT-2 XL", "ViT-L") for way in ("ours", "compiled layers", "CUDA graphs")]
# Largest first: an 8B's layers are what others publish.
MODELS = sorted(SHAPES, key=lambda name: "8B" not in name)
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512}
_SIZES = tuple(2**exponent for exponent in range(16, 29, 2))


def with_tiny_models(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run with sizes for CPUs without bf16 instructions, on which small products take minutes."""
    tiny = {name: replace(shape, small={**shape.small, **_TINY}) for name, shape in SHAPES.items()}
    with mock.patch.dict(SHAPES, tiny):
        return function(*arguments)


def speed(name: str, way: str, options: dict[str, Any] | None, is_real: bool) -> list[Any]:
    """Train without waiting for steps; return a row of the table, for each GPU.

    Host milliseconds are until a step has been launched; idle is the share of a step in which no kernel runs.
    """
    shape, device, steps = SHAPES[name], _device(), 8 if is_real else 1
    options = None if options is None else dict(options)
    packed = bool(options and options.pop("packed", False))
    step = single_device.step_of(shape, way, device, is_real, options, packed)
    for _ in range(3 if is_real else 1):
        step()
    single_device.wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    host = (time.perf_counter() - start) / steps
    single_device.wait(device)
    seconds = (time.perf_counter() - start) / steps
    tokens, work = (each / dist.get_world_size() for each in single_device.work_of(shape, is_real))
    rate, on_gpu = work / seconds, device.type == "cuda"
    chip = torch.cuda.get_device_name() if on_gpu else ""
    peak = next((PRESETS[each].flops["bf16"] for each in PRESETS if each in chip), None)
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else "-"
    idle = 1 - _busy(step, device) / seconds
    del step
    shares = ["-" if peak is None else f"{rate / peak:.0%}", f"{rate / single_device.matmul_peak(device, is_real):.0%}"]
    return [f"{tokens / seconds:,.0f}", f"{rate / 1e12:.3g}", *shares, host * 1e3, f"{idle:.0%}", memory]


def trace(name: str, path: str, is_real: bool) -> float:
    """Keep the trace of a step, for Perfetto; return the seconds of its kernels."""
    step = single_device.step_of(SHAPES[name], "ours", _device(), is_real, _OURS)
    step()
    return _busy(step, _device(), path)


def _busy(step: Step, device: torch.device, path: str | None = None) -> float:
    """Return the seconds of kernels in one step; write its trace to a file."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profiler:
        step()
        single_device.wait(device)
    if path is not None:
        profiler.export_chrome_trace(path)
    # Operators of the host repeat the time of their kernels, and annotations that of all kernels below them.
    events = (each for each in profiler.key_averages() if each.device_type == DeviceType.CUDA)
    return sum(each.self_device_time_total for each in events if not each.is_user_annotation) / 1e6


def layout(family: str, options: dict[str, Any]) -> str:
    """Train under a layout and plainly; say how far losses are from each other."""
    losses, plain = train(family, options)
    worst = max(abs(one - two) / abs(two) for one, two in zip(losses, plain, strict=True))
    return f"{'equal' if worst <= FP32 else 'DIFFERENT'}: {worst:.0e} from plain training"


def links(is_real: bool) -> list[list[Any]]:
    """Return a row of bandwidth, in GB/s of what a rank sends, for each size of a message."""
    rows = []
    for size in _SIZES if is_real else _SIZES[:1]:
        found = measure_axis(dist.group.WORLD, _device(), sizes=(size,), repeats=7 if is_real else 1)
        rows.append([size >> 10, *(each.bus_bandwidth / 1e9 for each in found.collectives)])
    return rows


def bucket_of(rows: Any) -> str:
    """Say from which size of a bucket on links have most of their speed; `rows`: what `links` returns."""
    if not isinstance(rows, list):
        return ""
    most = max(row[3] for row in rows)
    enough = min(row[0] for row in rows if row[3] >= 0.9 * most)
    return (
        f"Reduce-scatters have 0.9 of their largest bandwidth from {enough / 1024:g} MiB on: the least that "
        "`zero_bucket_size_in_mb` should be here."
    )


def bits(name: str, repeats: int, is_real: bool) -> str:
    """Compute the same pass in bf16 again and again; name the first operator that got other bits."""
    device = _device()
    model = single_device.build(SHAPES[name], device, is_real).bfloat16().eval()
    torch.manual_seed(1)
    batch = single_device.batch_of(SHAPES[name], model, device, is_real)
    batch = {key: each.bfloat16() if each.is_floating_point() else each for key, each in batch.items()}
    first: list[int] = []
    for number in range(repeats):
        with _Operators() as operators:
            model(**batch).loss.backward()
        model.zero_grad()
        found = torch.stack(operators.sums).tolist()
        first = first or found
        changed = next((at for at, (one, two) in enumerate(zip(first, found, strict=True)) if one != two), None)
        if changed is not None:
            return f"pass {number + 1} of {repeats}: {operators.names[changed]} got other bits first"
    return f"{repeats} passes: the same bits, of {len(first)} tensors"


class _Operators(TorchDispatchMode):
    """Sums of the bits of what each operator returns, with its name and its module, backward too."""

    def __enter__(self) -> _Operators:
        self.names, self.sums, self._modules = list[str](), list[Tensor](), ModuleTracker()
        self._modules.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if "empty" not in str(func):  # whose bits nobody has written
            where = max(self._modules.parents, key=len).partition(".")[2]
            way = "the gradient of " if self._modules.is_bw else ""
            for each in _tensors(output):
                self.names.append(f"{func} in {way}{where or 'the model'}")
                self.sums.append(_sum_of_bits(each))
        return output


def _tensors(output: Any) -> Iterator[Tensor]:
    values = output if isinstance(output, tuple | list) else (output,)
    return (each for each in values if isinstance(each, Tensor) and each.is_floating_point())


def _sum_of_bits(x: Tensor) -> Tensor:
    of_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(of_size).sum(dtype=torch.int64)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
