"""Random states of data loading, separate from those of training.

A batch therefore depends only on the replica and on how often the loaders were iterated: not on what the training loop
drew in the meantime, nor on how often training was interrupted. All ranks of a replica load the same data, which would
not hold for augmentations drawn from each rank's own random state. With one replica, order and samples draw in turns
from one stream, as in a plain loop.

With several replicas, each draws for its share, where a plain script draws for a whole batch. The numbers therefore
differ from those of a plain script, and one warning says so. They must also differ between replicas: the default
generators have different states there (`LoadingStream`), and so have the generators that a `collate_fn` holds.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from booster.logging import get_logger


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


_DEPTH = 5
_MANY = 64  # containers with more entries are treated as data and not searched
_METHODS = ("__call__", "__getitem__", "__iter__")


def generators_of(*owners: Any) -> list[torch.Generator]:
    """Return generators in closures, arguments, attributes and globals, at most five references away, each once."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    level = list(owners)
    for _ in range(_DEPTH):
        found |= {id(each): each for each in level if isinstance(each, torch.Generator)}
        seen |= {id(each) for each in level}
        level = [part for each in level for part in _parts(each) if id(part) not in seen]
    return list(found.values())


def _parts(owner: Any) -> Iterator[Any]:
    """Yield the objects that `owner` refers to."""
    if owner is None or isinstance(owner, str | bytes | int | float | Tensor | nn.Module | ModuleType | type):
        return
    if isinstance(owner, Mapping | list | tuple):
        values = owner.values() if isinstance(owner, Mapping) else owner
        yield from values if len(owner) <= _MANY else ()
    elif isinstance(owner, FunctionType):
        yield from _of_function(owner)
    elif isinstance(owner, MethodType):
        yield from (owner.__self__, owner.__func__)
    elif isinstance(owner, partial):
        yield from (owner.func, *owner.args, *owner.keywords.values())
    elif hasattr(owner, "__dict__"):
        yield from vars(owner).values()
        yield from (getattr(type(owner), name, None) for name in _METHODS)


def _of_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is not bound yet
            continue
    yield from (function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function reads, including those in nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_logger = get_logger(__name__)
_FIRST_BATCHES = 2  # a collator may create its generator with the first batch
_OWN = "a torch.Generator of its own"


class ReplicaCollate:
    """Wrapper of the user's `collate_fn` that draws different random numbers on every replica.

    Args:
        ordering: objects whose generators may determine the sample order, which must be the same on all replicas.
        num_workers: processes that load samples; 0 for this one.

    Attributes:
        draws_plainly: whether all samples are drawn here, by one replica: the numbers are those of a plain script.
    """

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        dataset: Any,
        ordering: Sequence[Any],
        rank: int,
        world_size: int,
        num_workers: int = 0,
    ) -> None:
        self.collate_fn, self.dataset, self.ordering = collate_fn, dataset, generators_of(*ordering)
        self.rank, self.world_size = rank, world_size
        self.draws_plainly = world_size == 1 and not num_workers
        self._numbers: dict[int, ReplicaNumbers] = {}
        self._num_batches, self._has_begun, self._has_warned = 0, False, self.draws_plainly
        self._left: dict[str, Any] | None = None  # states after the previous batch
        self._iteration = 0

    def begin(self, iteration: int) -> None:
        """Record the random states where another iteration begins or goes on, within the stream of its samples."""
        self._has_begun = True
        if self._num_batches < _FIRST_BATCHES and iteration != self._iteration:
            self._iteration, self._left = iteration, self._states()

    def __call__(self, samples: list[Any]) -> Any:
        """Collate samples with this replica's random numbers; warn if the first batches draw the job's own numbers."""
        if self._num_batches >= _FIRST_BATCHES:
            return self._collate(samples)
        self._num_batches += 1
        before = self._states()
        self._compare("the dataset", self._left, before)
        self._take_generators()
        batch = self._collate(samples)
        self._left = self._states()
        self._compare("collate_fn", before, self._left)
        return batch

    def _collate(self, samples: list[Any]) -> Any:
        with ExitStack() as stack:
            for numbers in self._numbers.values():
                stack.enter_context(numbers.active())
            return self.collate_fn(samples)

    def _take_generators(self) -> None:
        if self.rank > 0:
            shared = {id(generator) for generator in self.ordering}
            for generator in generators_of(self.collate_fn):
                if id(generator) not in shared:
                    self._numbers.setdefault(id(generator), ReplicaNumbers(generator, self.rank))

    def _states(self) -> dict[str, Any]:
        """Return generator states by owner; of one replica, without the user's own, which draw as in a plain script."""
        held = generators_of(self.collate_fn, self.dataset) if self.world_size > 1 else []
        return default_states() | {_OWN: [state_of_generator(generator.get_state()) for generator in held]}

    def _compare(self, who: str, before: dict[str, Any] | None, after: dict[str, Any]) -> None:
        """Warn once, on the first rank, if `who` has drawn random numbers."""
        if before is None or self._has_warned or not self._is_first_process():
            return
        drawn = next((name for name, state in after.items() if before.get(name, state) != state), None)
        if drawn is None:
            return
        self._has_warned = True
        why = f"each of the dp_size={self.world_size} replicas draws for its own samples"
        if self.world_size == 1:
            why = "data loading uses its own random stream instead"
        elif drawn == _OWN and who == "the dataset":
            why = f"each of the dp_size={self.world_size} replicas draws the same for other samples"
        _logger.warning(
            "%s draws random numbers from %s, and %s: batches differ from those of a plain script; for the same ones "
            "draw for each sample in __getitem__ from a torch.Generator seeded by the index%s",
            who,
            drawn,
            why,
            ", or use dp_size=1" if drawn == _OWN else "",
        )

    def _is_first_process(self) -> bool:
        """Return whether this is the first process of all ranks and workers; workers of later epochs do not count."""
        worker = get_worker_info()
        is_first = worker is None or (worker.id == 0 and not self._has_begun)
        return is_first and (not dist.is_initialized() or dist.get_rank() == 0)


class ReplicaNumbers:
    """Random numbers of one replica, used instead of those of a generator whose state is the same on all replicas."""

    def __init__(self, generator: torch.Generator, rank: int) -> None:
        self.generator, self.rank = generator, rank
        self._outer = self._inner = torch.empty(0)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch the generator to the replica's numbers; they restart if the user changed (reseeded) the generator."""
        outer = self.generator.get_state()
        if torch.equal(outer, self._outer):
            self.generator.set_state(self._inner)
        else:
            self._outer = outer
            drawn = torch.randint(2**62, (self.rank,), generator=self.generator, device=self.generator.device)
            self.generator.manual_seed(int(drawn[-1]))
        try:
            yield
        finally:
            self._inner = self.generator.get_state()
            self.generator.set_state(outer)
