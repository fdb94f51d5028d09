"""Fresh memory that nobody may read: it holds NaN, and the largest integers, in the place of what was there before.

Memory that a program reads before it has written it gives other numbers from run to run, and mostly the right ones in
tests: zeros of fresh pages. Poisoned, the first such read shows in the loss.
"""

from __future__ import annotations

import warnings

import torch


def poison_fresh_memory() -> None:
    """Let `torch.empty` and its like fill what they return, in this process and from now on."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    # The setting above counts in this mode alone, which changes no algorithm on a CPU.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*deterministic")
