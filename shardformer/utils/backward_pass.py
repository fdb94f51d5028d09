"""Whether code runs in a backward pass, where layers are recomputed."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1
