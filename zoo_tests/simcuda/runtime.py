"""The library of the simulated device in this process, and who is told of what it does."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zoo_tests.simcuda import build

Listener = Callable[[str, str], None]  # (kind, what); an exception is raised where the device was used
_REPOSITORY = Path(__file__).resolve().parents[2]
_OWN = ("zoo_tests/simcuda/",)

lib: ctypes.CDLL | None = None
listeners: list[Listener] = []  # told of ("kernel", name), ("sync", what the host waits for), ("race", of two streams)


def load_library() -> bool:
    """Load the library into this process; whether it was not loaded before.

    Raises:
        RuntimeError: it could not be built.
    """
    global lib
    if lib is not None:
        return False
    path = build.library()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"the simulated CUDA device does not fit torch {torch.__version__}: {error}") from None
    for name in ("simcuda_allocated", "simcuda_peak", "simcuda_current_stream"):
        getattr(lib, name).restype = ctypes.c_int64
    lib.simcuda_checksum.restype = ctypes.c_uint64
    lib.simcuda_checksum.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.simcuda_poison.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    lib.simcuda_set_stream.argtypes = [ctypes.c_int64]
    lib.simcuda_observe(_observer)
    return True


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
def _observer(kind: bytes, what: bytes) -> int:
    try:
        tell(kind.decode(), what.decode())
    except Exception as error:
        lib.simcuda_refuse(str(error).encode())
        return 1
    return 0


def tell(kind: str, what: str) -> None:
    """Tell all listeners."""
    for listener in list(listeners):
        listener(kind, what)


def host(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor."""
    if not tensor.is_cuda:
        return tensor.detach()
    with torch.no_grad():
        return torch.ops.simcuda.host(tensor.detach())


def use_on(stream: torch.Stream, tensor: Tensor, writes: bool, what: str) -> None:
    """Note that work on a stream reads or writes a tensor.

    Raises:
        RuntimeError: another stream uses it, and no event orders the two.
    """
    if tensor.is_cuda:
        torch.ops.simcuda.use(tensor.detach(), stream.stream_id, writes, what)


def poison(tensor: Tensor) -> None:
    """Fill a contiguous tensor with NaN, or the largest unsigned integers."""
    lib.simcuda_poison(tensor.data_ptr(), tensor.nbytes, tensor.dtype == torch.bool)


def checksum(tensor: Tensor) -> int:
    """A number that changes with any byte of a contiguous tensor."""
    return lib.simcuda_checksum(tensor.data_ptr(), tensor.nbytes)


def source_line() -> str:
    """The innermost line of the repository, outside of this folder, that runs in this thread, and of transformers."""
    frame, inner = sys._getframe(1), ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not inner and "transformers" in path.parts:
            inner = f" in {'/'.join(path.parts[path.parts.index('transformers') :])}:{frame.f_lineno}"
        if path.is_relative_to(_REPOSITORY) and not any(part.startswith(".venv") for part in path.parts):
            name = path.relative_to(_REPOSITORY).as_posix()
            if not name.startswith(_OWN) or path.name.startswith("test_"):
                return f"{name}:{frame.f_lineno}{inner}"
        frame = frame.f_back
    return f"autograd's own code{inner}"
