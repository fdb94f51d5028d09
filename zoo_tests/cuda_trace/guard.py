"""Registers a CUDA device without memory in a CPU build of torch, so that autograd accepts fake CUDA tensors.

This module must not import torch: torch asks for its devices once, when it is imported.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_SOURCE = Path(__file__).with_name("guard.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_S = 120


class NoGuardError(RuntimeError):
    """The library cannot be built here."""


def load() -> None:
    """Load the library into this process; must be called before torch is imported.

    Raises:
        NoGuardError: it cannot be built.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before its CUDA device was registered")
    built = library()
    ctypes.CDLL(str(_torch() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built))


def library() -> Path:
    """Build the library for the installed torch, or return the one that was built before.

    Raises:
        NoGuardError: there is no compiler, torch has a real CUDA device, or the source does not fit its headers.
    """
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        raise NoGuardError(f"fake CUDA tensors need a CPU build of torch, and {version('torch')} is built for CUDA")
    key = hashlib.sha256(_SOURCE.read_bytes() + str(_torch()).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"cuda-trace-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise NoGuardError(f"{folder} belongs to another user; set TMPDIR to a directory of your own")
    target = folder / f"guard-{version('torch')}-{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes, one builds
        if not target.exists():
            compile_to(target)
    return target


def compile_to(target: Path) -> None:
    """Compile the library.

    Raises:
        NoGuardError: as `library`.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoGuardError(f"fake CUDA tensors need a C++ compiler, and there is none of {', '.join(_COMPILERS)}")
    made, torch = target.with_suffix(".new"), _torch()
    paths = [f"-I{torch}/include", f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(_SOURCE), "-o", str(made), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        raise NoGuardError(f"fake CUDA tensors do not fit the headers of torch {version('torch')}: {first}")
    made.replace(target)


def _torch() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent
