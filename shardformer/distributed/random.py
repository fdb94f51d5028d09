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
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.utils.derived_modules import derive
from shardformer.utils.untraced import defines_operators

Result = TypeVar("Result")

_SEED_LIMIT = 2**62


@contextmanager
def parallel_region(rank: int) -> Iterator[None]:
    """Draw numbers that differ by `rank` of the tensor-parallel axis; the shared stream goes on as before."""
    seed = _seed_of(rank)
    with restoring_default_generators():
        seed_default_generators(seed)
        yield


def _seed_of(rank: int) -> int:
    # Drawn on the CPU even for a GPU region: no synchronisation with the device.
    seed = int(torch.randint(_SEED_LIMIT, (), device="cpu"))
    return seed ^ (0x9E3779B97F4A7C15 * (rank + 1) % _SEED_LIMIT)


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
    states = random_states()
    seed_all_generators(seed)
    try:
        yield
    finally:
        set_random_states(states)


def random_states() -> dict[str, Any]:
    """Return the states of the default generators of torch, Python and, if it is imported, numpy."""
    return {"torch": _default_states(), **_host_states()}


def set_random_states(states: dict[str, Any]) -> None:
    """Set states that `random_states` has returned."""
    _set_default_states(states["torch"])
    _set_host_states(states)


def _host_states() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {"python": random.getstate(), "numpy": None if numpy is None else numpy.random.get_state()}


def _set_host_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])


def in_parallel_region(rank: int, function: Callable[..., Result], x: Tensor, *args: Any, **kwargs: Any) -> Result:
    """Call `function(x, ...)`, which returns a tensor or a tuple that begins with one, in a `parallel_region`.

    In a graph, two operators enter and leave it. They copy `x` and the result, so that the draws lie between them.
    """
    if not torch.compiler.is_compiling():
        with parallel_region(rank):
            return function(x, *args, **kwargs)
    ops = torch.ops.booster
    x, states = ops.enter_region(x, rank)
    found = function(x, *args, **kwargs)
    if isinstance(found, tuple):
        return ops.leave_region(found[0], states), *found[1:]
    return ops.leave_region(found, states)


@defines_operators
def define_regions() -> None:
    """Define the operators of regions in graphs."""
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)  # states of the host are not recorded
    random_op = partial(torch.library.custom_op, mutates_args=(), tags=tags)

    @random_op("booster::enter_region")
    def enter(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        seed, states = _seed_of(rank), torch.cat([*_default_states().values()])
        seed_default_generators(seed)
        return x.clone(), states

    @random_op("booster::leave_region")
    def leave(x: Tensor, states: Tensor) -> Tensor:
        inside = _default_states()
        _set_default_states(dict(zip(inside, states.split([*map(len, inside.values())]), strict=True)))
        return x.clone()

    def shapes(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        num_bytes = sum(map(len, _default_states().values()))
        return torch.empty_like(x), x.new_empty(num_bytes, dtype=torch.uint8, device="cpu")

    enter.register_fake(shapes)
    leave.register_fake(lambda x, states: torch.empty_like(x))
    enter.register_autograd(lambda ctx, grad, _: (grad, None))
    leave.register_autograd(lambda ctx, grad: (grad, None))


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

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the generator of each device type."""
        return dict(self._states)

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
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

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Be `active`, and have Python's and numpy's generators follow this stream."""
        outer = _host_states()
        with self.active():
            _seed_host_generators(int(torch.randint(_SEED_LIMIT, (), device="cpu")))
            try:
                yield
            finally:
                _set_host_states(outer)

    @staticmethod
    def _states_after_seeding(seed: int) -> dict[str, Tensor]:
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


def seed_all_generators(seed: int) -> None:
    """Seed the default generators of torch, Python and, if it is imported, numpy."""
    seed_default_generators(seed)
    _seed_host_generators(seed)


def _seed_host_generators(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _default_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_default_states(states: dict[str, Tensor]) -> None:
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
