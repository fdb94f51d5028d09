"""Random states of data loading, separate from those of training.

A batch therefore depends only on the replica and on how often the loaders were iterated: not on what the training loop
drew in the meantime, nor on how often training was interrupted. All ranks of a replica load the same data, which would
not hold for augmentations drawn from each rank's own random state. With one replica, order and samples draw in turns
from one stream, as in a plain loop.
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
    """Generator states of torch, Python and numpy for data loading; initially copies of the current default states."""

    def __init__(self) -> None:
        self._states, self._is_active = _states(), False

    @classmethod
    def seeded(cls, seed: int) -> LoadingStream:
        """Create the stream that begins with `torch.manual_seed(seed)` and the equivalents in Python and numpy."""
        outer = _states()
        _seed_all(seed)
        stream = cls()
        _restore(outer)
        return stream

    @classmethod
    def derived(cls, *seed: Any) -> LoadingStream:
        """Create a stream from strings and numbers; different values give independent streams."""
        digest = hashlib.sha256(repr(seed).encode()).digest()
        return cls.seeded(int.from_bytes(digest[:4], "little"))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch the default generators to this stream within the context, and restore the outer states afterwards."""
        if self._is_active:
            yield
            return
        outer, self._is_active = _states(), True
        _restore(self._states)
        try:
            yield
        finally:
            self._states, self._is_active = _states(), False
            _restore(outer)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators by library, as tensors and arrays of their words."""
        version, words, gauss = self._states["python"]
        return self._states | {"python": (version, torch.tensor(words), gauss)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        version, words, gauss = state["python"]
        self._states = state | {"python": (version, tuple(words.tolist()), gauss)}


class OrderStream(LoadingStream):
    """Random stream of the sample order, which a plain loader draws from the default generators.

    These go on with it while they have its states: what a script draws after a loop, such as the weights of its next
    model, is what it draws after a plain loop.
    """

    _left: dict[str, Any] | None = None  # states of the default generators after the latest draws

    @property
    def is_current(self) -> bool:
        """Whether the default generators are as the latest draws have left them."""
        return self._left is not None and len(_equal(self._left, _states())) == len(self._left)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Give the default generators that have this stream's states those that it has at the end of the context."""
        outer = _states()
        together = _equal(outer, self._states)
        try:
            yield
        finally:
            self._left = outer | {name: self._states[name] for name in together}
            _restore(self._left)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        self._left = _states()


def default_states() -> dict[str, Any]:
    """Return the states of the default generators by name, in a form that can be compared."""
    states = _states()
    comparable = {"torch's default generator": state_of_generator(states["torch"]), "random": states["python"]}
    if "numpy" in states:
        _, words, *rest = states["numpy"]
        comparable["numpy's default generator"] = (words.tobytes(), rest)
    return comparable


def state_of_generator(state: torch.Tensor) -> str:
    """Convert the result of `torch.Generator.get_state` to text, which can be compared."""
    return state.numpy().tobytes().hex()


def _states() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _equal(states: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Return the libraries whose generators have the same states in both."""
    return [name for name, state in states.items() if name in others and _words(state) == _words(others[name])]


def _words(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return [each.tobytes() if hasattr(each, "tobytes") else each for each in state]


def _restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # numpy takes 32 bits
