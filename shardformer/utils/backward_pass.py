"""Whether code runs in a backward pass, where layers are recomputed."""

from __future__ import annotations

import torch


def current_pass() -> int:
    """Return the number of the backward pass that autograd runs on this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return current_pass() != -1
