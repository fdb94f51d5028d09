"""UnitStream: random numbers by seed, step, sample and module, never by rank or stage.

The generator is seeded when a pass enters a layer or another module outside of the layers, and when it leaves one. What
is drawn in between depends on nothing but the seed, the step, the position of the unit of samples in the global batch,
the name of the module and how often it was called in this pass.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.distributed.random import SharedStream, seed_default_generators
from shardformer.utils.backward_pass import in_backward


class UnitStream(SharedStream):
    """Random stream of a model that is seeded by position.

    Args:
        seed: the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._step, self._first, self._next, self._unit = -1, 0, 0, 0
        self._calls: Counter[str] = Counter()
        self._seeds: dict[tuple[str, int], int] = {}  # (name, seed before its call) -> seed, for recomputation
        self._is_active = False
        self._attached: set[nn.Module] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitStream:
        """Serve the copies of a model too."""
        return self

    def restart(self, step: int) -> None:
        """Do nothing: a step that is resumed has its numbers."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the numbers follow from the number of the step."""
        return {}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Do nothing, see `state_dict`."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the default generator inside the context; restore the user's states afterwards."""
        before, self._is_active = self._is_active, True
        try:
            with super().active():
                yield
        finally:
            self._is_active = before

    def begin_pass(self, step: int, units_before: int, units: int) -> None:
        """Note which samples come next.

        Args:
            step: number of optimizer steps so far.
            units_before: units of this batch on the replicas before this one.
            units: units of this batch on all replicas.
        """
        if step != self._step:
            self._step, self._next = step, 0
            self._seeds.clear()
        self._first = self._next + units_before
        self._next += units

    def begin_unit(self, index: int) -> None:
        """Seed for unit `index` of this replica's part of the batch."""
        if self._is_active:
            self._unit = self._first + index
            self._calls.clear()
            seed_default_generators(self._seed_of(""))

    def attach(self, model: nn.Module) -> None:
        """Seed at the layers of `model`, and at its other modules that have no modules inside; call it once a stage."""
        self._attach_below(model, "")

    def _attach_below(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            if child in self._attached:
                continue
            if isinstance(module, nn.ModuleList) or not any(True for _ in child.children()):
                self._attached.add(child)
                child.register_forward_pre_hook(partial(self._enter, where))
                child.register_forward_hook(partial(self._leave, where))
            else:
                self._attach_below(child, where)

    def _enter(self, name: str, *_: Any) -> None:
        if not self._is_active:
            return
        key = (name, torch.initial_seed())
        if not in_backward():
            self._calls[name] += 1
            self._seeds[key] = self._seed_of(f"{name}:{self._calls[name]}")
        # Recomputation restores the generator first, so that the key is that of the forward pass.
        if key in self._seeds:
            seed_default_generators(self._seeds[key])

    def _leave(self, name: str, *_: Any) -> None:
        if self._is_active and not in_backward():
            seed_default_generators(self._seed_of(f"{name}:{self._calls[name]}:after"))

    def _seed_of(self, place: str) -> int:
        text = f"{self.seed}:{self._step}:{self._unit}:{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
