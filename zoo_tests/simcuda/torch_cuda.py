"""What of `torch.cuda` a torch built without CUDA lacks, for the simulated device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from zoo_tests.simcuda import runtime

CAPABILITY = (9, 0)
NAME = "simulated CUDA device"
TOTAL_MEMORY = 8 * 2**30
_DEVICE = "ZOO_TESTS_DEVICE"  # of harness/ranks.py, which would import the library before the device is there
_MACHINE = 4  # devices, one for each rank of any test


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device="cuda", priority=priority)


class Event:
    """An event of the device: an object of torch's own class, which compares no others."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Any = None) -> Stream:
    return _stream(runtime.lib.simcuda_current_stream())


def default_stream(device: Any = None) -> Stream:
    return _stream(0)


def _stream(number: int) -> Stream:
    return Stream(stream_id=number, device_index=current_device(), device_type=1)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        runtime.lib.simcuda_set_stream(stream.stream_id)


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    outer = current_stream()
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(outer)


def device_count() -> int:
    """How many devices a process sees: those of the machine under `pytest --device simcuda`, otherwise its own."""
    return _MACHINE if os.environ.get(_DEVICE) == "simcuda" else 1


def current_device() -> int:
    return runtime.lib.simcuda_current_device()


def set_device(device: Any) -> None:
    """Choose the device of this process, which uses no other."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index in (None, -1):
        return
    if not 0 <= index < device_count():
        raise RuntimeError(
            f"CUDA error: invalid device ordinal ({device}); this process sees {device_count()} device(s)"
        )
    runtime.lib.simcuda_set_device(index)


def synchronize(device: Any = None) -> None:
    runtime.lib.simcuda_synchronize()


def get_device_properties(device: Any = None) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=TOTAL_MEMORY,
        multi_processor_count=1,
        is_integrated=False,
        gcnArchName="",
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152,
        L2_cache_size=2**25,
        uuid=f"simulated-{os.getpid() if device_count() == 1 else current_device()}",
    )


def memory_stats(device: Any = None) -> dict[str, int]:
    now, most = runtime.lib.simcuda_allocated(), runtime.lib.simcuda_peak()
    return {
        f"{kind}.all.{which}": value
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes")
        for which, value in (("current", now), ("peak", most))
    } | {"num_alloc_retries": 0, "num_ooms": 0}


def install() -> None:
    """Put all of this into `torch.cuda`."""
    lib, cuda = runtime.lib, torch.cuda

    def allocated(device: Any = None) -> int:
        return lib.simcuda_allocated()

    def peak(device: Any = None) -> int:
        return lib.simcuda_peak()

    def reset_peak(device: Any = None) -> None:
        lib.simcuda_reset_peak()

    functions = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": device_count,
        "current_device": current_device,
        "set_device": set_device,
        "_exchange_device": lambda device: current_device(),
        "_maybe_exchange_device": lambda device: current_device(),
        "synchronize": synchronize,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": get_device_properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - allocated(), TOTAL_MEMORY),
        "memory_stats": memory_stats,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
    }
    for name, function in functions.items():
        setattr(cuda, name, function)
    for module in (cuda.memory, cuda.streams, cuda.random, cuda.graphs):
        for name, function in functions.items():
            if hasattr(module, name):
                setattr(module, name, function)
    cuda._initialized = True
    lib.simcuda_show_devices(device_count())
    cuda.default_generators = (torch.Generator(device="cuda"),) * device_count()  # the library gives the default first
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    """Send a CPU copy to other processes, which may be without the device."""
    return reductions.reduce_tensor(tensor.cpu() if tensor.is_cuda else tensor)
