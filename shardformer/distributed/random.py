"""Random streams that follow the mesh.

Replicated regions (dropout after a row-parallel linear) must draw the same numbers on every tensor-parallel rank, or
replicated activations drift apart; sharded regions (dropout inside attention heads) must draw different ones. The
default generator is the shared stream during a forward pass. A sharded region seeds its own generator from the next
number of the shared stream and the rank. Restoring the default generator (activation checkpointing, a checkpoint)
therefore restores the sharded regions too; there is no second state to save.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardformer.utils.derived_modules import derive
from shardformer.utils.untraced import untraced

Result = TypeVar("Result")

_SEED_LIMIT = 2**62


@contextmanager
def parallel_region(rank: int) -> Iterator[None]:
    """Draw random numbers that differ between ranks; the shared stream then continues as if not interrupted.

    Args:
        rank: position on the tensor-parallel axis.
    """
    # Drawn on the CPU even for a GPU region: no synchronisation with the device.
    seed = int(torch.randint(_SEED_LIMIT, (), device="cpu"))
    with restoring_default_generators():
        seed_default_generators(seed ^ (0x9E3779B97F4A7C15 * (rank + 1) % _SEED_LIMIT))
        yield


@contextmanager
def restoring_default_generators() -> Iterator[None]:
    """Restore the state of the default generators at the end."""
    states = _default_states()
    try:
        yield
    finally:
        _set_default_states(states)


@contextmanager
def random_numbers_apart(seed: int = 0) -> Iterator[None]:
    """Seed the default generators of torch, Python and numpy in this context, and restore their states at its end."""
    states, numpy = random_states(), sys.modules.get("numpy")
    seed_default_generators(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        set_random_states(states)


def random_states() -> dict[str, Any]:
    """Return the states of the default generators of torch, Python and, if it is imported, numpy."""
    numpy = sys.modules.get("numpy")
    numbers = None if numpy is None else numpy.random.get_state()
    return {"torch": _default_states(), "python": random.getstate(), "numpy": numbers}


def set_random_states(states: dict[str, Any]) -> None:
    """Set states that `random_states` has returned."""
    _set_default_states(states["torch"])
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])


@untraced
def in_parallel_region(rank: int, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call `function` in a `parallel_region`."""
    with parallel_region(rank):
        return function(*args, **kwargs)


class SharedStream:
    """Random stream of the replicated regions of one model, separate from the user's own random numbers.

    Args:
        seed: the same on all ranks of a tensor-parallel group, different in other groups.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._states = self._states_after_seeding(seed)

    def restart(self, step: int) -> None:
        """Reseed for training that resumes at `step` on another layout, so that no numbers repeat."""
        self._states = self._states_after_seeding((self.seed + 0x9E3779B97F4A7C15 * step) % _SEED_LIMIT)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the generator of each device type."""
        return dict(self._states)

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Restore states that `state_dict` returned."""
        self._states = dict(states)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the default generator inside the context; restore the user's states afterwards."""
        outer = _default_states()
        _set_default_states(self._states)
        try:
            yield
        finally:
            self._states = _default_states()
            _set_default_states(outer)

    @staticmethod
    def _states_after_seeding(seed: int) -> dict[str, torch.Tensor]:
        outer = _default_states()
        seed_default_generators(seed)
        states = _default_states()
        _set_default_states(outer)
        return states


def adopt_first_generator(group: ProcessGroup, device: torch.device) -> None:
    """Adopt the random states of the first rank of `group`, on the CPU and on `device`."""
    names = ("cpu",) if device.type == "cpu" else ("cpu", "cuda")
    states = {name: _default_states()[name].to(device) for name in names}
    for state in states.values():
        dist.broadcast(state, group=group, group_src=0)
    _set_default_states({name: state.cpu() for name, state in states.items()})


def seed_default_generators(seed: int) -> None:
    """Seed the default generator of each device type."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def _default_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_default_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def draw_per_rank(module: nn.Module, rank: int) -> nn.Module:
    """Return a replacement for `module` whose random draws, including those inside kernels, use a per-rank stream."""
    new = derive(module, _DrawsPerRank)
    new.rank_of_draws, new.forward_in_region = rank, vars(module).pop("forward", None)
    return new


class _DrawsPerRank(nn.Module):
    """Runs the native forward, or one that the object itself had, in the region of a rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        native = self.forward_in_region or super().forward
        with parallel_region(self.rank_of_draws):
            return native(*args, **kwargs)
