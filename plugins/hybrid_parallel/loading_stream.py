"""Random numbers of data loading, apart from those of training.

A batch then depends on the seed, the epoch and the replica alone: not on what the training loop drew in the meantime,
nor on how often training was interrupted. All ranks of a replica load the same, which augmentations drawn from each
rank's own numbers would not.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class LoadingStream:
    """torch's, Python's and numpy's default generators as loading sees them.

    Args:
        seed: what the numbers depend on: strings and numbers.
    """

    def __init__(self, *seed: Any) -> None:
        digest = hashlib.sha256(repr(seed).encode()).digest()
        self._seed: int | None = int.from_bytes(digest[:4], "little")  # numpy takes 32 bits
        self._states: dict[str, Any] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Loading draws from this stream; afterwards the others' numbers go on as if not interrupted."""
        outer = _states()
        if self._seed is not None:
            _seed_all(self._seed)
            self._seed = None
        else:
            _restore(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(outer)


def _states() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
