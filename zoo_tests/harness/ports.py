"""Ports for jobs that tests start."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20000, 30000)  # below those that the system gives to outgoing connections


def free_port() -> str:
    """Return a port that a job can listen on; no connection of another test takes it until it does."""
    for port in random.Random().sample(_PORTS, 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)
    raise RuntimeError(f"none of 100 ports from {_PORTS.start} to {_PORTS.stop} is free")
