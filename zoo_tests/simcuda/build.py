"""Builds the library of the simulated device with the system's compiler, once for each torch and each source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_SOURCES = ("device.cpp", "operators.cpp", "streams.cpp")
_HEADERS = ("device.h",)
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_S = 900  # of compiling; alone it takes a minute


def library() -> Path:
    """The built library, from the cache where it was built before.

    Raises:
        RuntimeError: there is no compiler, torch has CUDA kernels of its own, or the sources do not fit its headers.
    """
    if torch.version.cuda is not None:
        raise RuntimeError(
            f"torch {torch.__version__} has CUDA kernels, which the simulated CUDA device cannot replace; install a "
            "CPU build of torch, or run `make gpu` on a GPU"
        )
    target = _cache() / f"simcuda-{torch.__version__}-{_hash()}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None or shutil.which(compiler) is None:
        raise RuntimeError(
            f"the simulated CUDA device needs a C++ compiler, and there is none of {', '.join(_COMPILERS)}; install g++"
        )
    with (target.parent / "simcuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes, one builds
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    """Compile all sources at the same time, then link."""
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    headers = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(prefix="simcuda-") as directory:
        objects = {source: f"{directory}/{source}.o" for source in _SOURCES}
        running = [
            subprocess.Popen(
                [compiler, "-std=c++20", "-O1", "-fPIC", abi, *headers, "-c", str(_HERE / source), "-o", made],
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, made in objects.items()
        ]
        for process, text in zip(running, _errors_of(running), strict=True):
            _check(process.returncode, text)
        made = f"{directory}/library.so"
        libraries = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
        linked = subprocess.run(
            [compiler, "-shared", *objects.values(), "-o", made, *libraries], capture_output=True, text=True
        )
        _check(linked.returncode, linked.stderr)
        shutil.copy(made, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)


def _errors_of(running: list[subprocess.Popen]) -> list[str]:
    """What each of the compilers says; none outlives this."""
    deadline = time.monotonic() + _LIMIT_S
    try:
        return [process.communicate(timeout=deadline - time.monotonic())[1] for process in running]
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the simulated CUDA device was not compiled within {_LIMIT_S} s; try again on a quieter machine"
        ) from None
    finally:
        for process in running:
            process.kill()


def _check(code: int, errors: str) -> None:
    if code != 0:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[-300:])
        raise RuntimeError(f"the simulated CUDA device does not fit the headers of torch {torch.__version__}: {first}")


def _hash() -> str:
    content = b"".join((_HERE / name).read_bytes() for name in (*_SOURCES, *_HEADERS))
    return hashlib.sha256(content).hexdigest()[:16]


def _cache() -> Path:
    """A directory of the user's own; another user's library is never loaded."""
    chosen = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    for place in (Path(chosen) / "simcuda", Path(tempfile.gettempdir()) / f"simcuda-{os.getuid()}"):
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if place.stat().st_uid == os.getuid() and os.access(place, os.W_OK):
            return place
    return Path(tempfile.mkdtemp(prefix="simcuda-"))
