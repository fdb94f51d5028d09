"""The batches of all replicas together are those of torch's own loader: the same samples in the same order.

Each kind of loader is iterated as scripts do: whole epochs, one that is left early, another loader in between.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader, shard_dataloader
from plugins.hybrid_parallel.data.random_stream import OrderStream

_SAMPLES, _BATCH, _RANKS = 23, 2, 2
_DATA = TensorDataset(torch.arange(_SAMPLES))
_WEIGHTS = [1.0 + index % 5 for index in range(_SAMPLES)]


class _Shuffled(Sampler[int]):
    """Draws from Python's and numpy's numbers, as a sampler of the user's may."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(_SAMPLES))
        random.shuffle(order)
        return iter(order[int(np.random.randint(3)) :])

    def __len__(self) -> int:
        return _SAMPLES


class _ShuffledStream(IterableDataset):
    """A buffer from which samples are drawn."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        buffer = list(range(_SAMPLES))
        while buffer:
            yield (torch.tensor(buffer.pop(random.randrange(min(4, len(buffer))))),)


class _CountingSampler(_Shuffled):
    """Orders by the number of epochs, which it counts itself."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(random.Random(self.epochs).sample(range(_SAMPLES), _SAMPLES))


class _WithState:
    """The part of a sampler, batch sampler or dataset that saves its count."""

    epochs: int

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": {0: self.epochs}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"][0]


class _StatefulSampler(_WithState, _CountingSampler):
    pass


class _StatefulBatches(_WithState, BatchSampler):
    def __init__(self, size: int) -> None:
        super().__init__(_CountingSampler(), size, False)

    @property
    def epochs(self) -> int:
        return self.sampler.epochs

    @epochs.setter
    def epochs(self, value: int) -> None:
        self.sampler.epochs = value


class _CountingStream(IterableDataset):
    epochs = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        self.epochs += 1
        order = random.Random(self.epochs).sample(range(_SAMPLES), _SAMPLES)
        return ((torch.tensor(index),) for index in order)


class _StatefulStream(_WithState, _CountingStream):
    pass


def _loader(batch_size: int, **options: Any) -> DataLoader:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    return DataLoader(options.pop("dataset", _DATA), batch_size=batch_size, **options)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


_KINDS: dict[str, Callable[[int], DataLoader]] = {
    "in order": lambda size: _loader(size),
    "shuffle": lambda size: _loader(size, shuffle=True),
    "shuffle, drop_last": lambda size: _loader(size, shuffle=True, drop_last=True),
    "shuffle by workers": lambda size: _loader(size, shuffle=True, num_workers=2),
    "generator": lambda size: _loader(size, shuffle=True, generator=_generator),
    "generator of the sampler": lambda size: _loader(size, sampler=RandomSampler(_DATA, generator=_generator())),
    "replacement": lambda size: _loader(size, sampler=RandomSampler(_DATA, replacement=True, num_samples=50)),
    "weighted": lambda size: _loader(size, sampler=WeightedRandomSampler(_WEIGHTS, 19)),
    "subset": lambda size: _loader(size, sampler=SubsetRandomSampler(range(3, 20))),
    "own sampler": lambda size: _loader(size, sampler=_Shuffled()),
    "batch sampler": lambda size: DataLoader(_DATA, batch_sampler=BatchSampler(RandomSampler(_DATA), size, False)),
    "persistent workers": lambda size: _loader(size, shuffle=True, num_workers=1, persistent_workers=True),
    "sampler with a state": lambda size: _loader(size, sampler=_StatefulSampler()),
    "batch sampler with a state": lambda size: DataLoader(_DATA, batch_sampler=_StatefulBatches(size)),
    "iterable with a state": lambda size: _loader(size, dataset=_StatefulStream()),
    "iterable": lambda size: _loader(size, dataset=_ShuffledStream()),
    "iterable by a worker": lambda size: _loader(size, dataset=_ShuffledStream(), num_workers=1),
}


def _seed_all() -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)


def _values(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch[0].tolist() for _, batch in zip(range(count or 99), batches, strict=False)]


def _iterate(training: DataLoader, evaluation: DataLoader) -> list[list[int]]:
    """Two epochs, one that is left early and one more, with an evaluation in between."""
    found = _values(training)
    _values(evaluation)
    found += _values(training)
    found += _values(training, 2)
    return found + _values(training)


def _boosted(make: Callable[[int], DataLoader], rank: int, order: OrderStream) -> ShardedDataLoader:
    return shard_dataloader(make(_BATCH), rank, _RANKS, torch.device("cpu"), order)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.slow
def test_batches_of_all_replicas_are_those_of_torch(kind: str) -> None:
    _seed_all()
    expected = _iterate(_KINDS[kind](_BATCH * _RANKS), _KINDS["in order"](_BATCH))
    _seed_all()
    orders = [OrderStream() for _ in range(_RANKS)]
    shares = []
    for rank, order in enumerate(orders):
        loaders = [_boosted(_KINDS[name], rank, order) for name in (kind, "in order")]
        shares.append(_iterate(*loaders))
    assert [[index for part in parts for index in part] for parts in zip(*shares, strict=True)] == expected


# In `make test-fast` one kind of each mechanism.
# Another iteration ends that of persistent workers, and moves the state of objects that count iterations.
_ONE_ITERATION = [kind for kind in _KINDS if "with a state" in kind or "worker" in kind]
_ALWAYS = ("shuffle", "generator of the sampler", "sampler with a state", "iterable with a state", "persistent workers")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in _ALWAYS else pytest.mark.slow) for kind in _KINDS]
)
def test_the_order_goes_on_after_resuming(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Interrupted in the first, second and third epoch, behind an evaluation that drew too and a look at a batch."""
    for epoch, taken in ((0, 2), (1, 4), (2, 1)):
        _seed_all()
        order = OrderStream()
        training, evaluation = (_boosted(_KINDS[name], 1, order) for name in (kind, "in order"))
        for _ in range(epoch):
            _values(training)
        batches = iter(training)
        _values(batches, taken)
        _values(evaluation)
        if kind not in _ONE_ITERATION:
            next(iter(training))
        state = json.loads(json.dumps(training.state_dict()))
        expected = _values(batches) + _values(training)
        torch.manual_seed(99), random.seed(99)
        other = _boosted(_KINDS[kind], 1, OrderStream())
        other.load_state_dict(state)
        assert _values(other) + _values(other) == expected, (epoch, taken)
    assert "not saved" not in caplog.text


@pytest.mark.parametrize("kind", ["in order", "shuffle", "shuffle by workers"])
def test_the_default_generator_goes_on_as_after_a_plain_loop(kind: str) -> None:
    """The weights of a model that is built then are those of a plain script."""
    drawn = []
    for share in (lambda plain: plain, lambda plain: shard_dataloader(plain, 0, 1, torch.device("cpu"), OrderStream())):
        _seed_all()
        loader = share(_KINDS[kind](_BATCH))
        for _ in range(2):
            list(loader)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


class _Epochs:
    """The part of a sampler, batch sampler or dataset that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class _SamplerOfEpochs(_Epochs, _Shuffled):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, _SAMPLES))


class _BatchesOfEpochs(_Epochs, BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.epoch, 0], [self.epoch, 1]])


class _StreamOfEpochs(_Epochs, IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return ((torch.tensor(self.epoch),) for _ in range(4))


class _DataOfEpochs(_Epochs, TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (self.tensors[0][index] + 100 * self.epoch,)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": _SamplerOfEpochs(), "batch_size": 2},
        {"batch_sampler": _BatchesOfEpochs(range(_SAMPLES), 2, False)},
        {"dataset": _StreamOfEpochs(), "batch_size": 2},
        {"dataset": _DataOfEpochs(torch.arange(_SAMPLES)), "batch_size": 2},
    ],
    ids=["sampler", "batch sampler", "iterable", "dataset"],
)
def test_an_epoch_that_is_set_reaches_the_users_object(options: dict[str, Any]) -> None:
    loader = shard_dataloader(DataLoader(**{"dataset": _DATA} | options), 0, 1, torch.device("cpu"), OrderStream())
    before = _values(loader)
    loader.set_epoch(3)
    assert 3 not in before[0] and _values(loader)[0][0] in (3, 300)


@pytest.mark.parametrize("kind", ["in order", "shuffle", "sampler with a state", "iterable", "shuffle by workers"])
def test_each_iteration_has_its_own_position(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    _seed_all()
    plain = _KINDS[kind](_BATCH)
    expected = [[batch[0].tolist() for batch in pair] for pair in zip(plain, plain, strict=True)]
    _seed_all()
    loader = shard_dataloader(_KINDS[kind](_BATCH), 0, 1, torch.device("cpu"), OrderStream())
    assert [[batch[0].tolist() for batch in pair] for pair in zip(loader, loader, strict=True)] == expected
    assert (loader.epoch, loader.position) == (1, 0) and "draws random numbers" not in caplog.text
    with pytest.raises(ConfigurationError, match="cannot be copied or pickled"):
        copy.deepcopy(loader)


@pytest.mark.parametrize(
    ("options", "role"),
    [
        ({"sampler": _CountingSampler}, "the sampler of the loader"),
        ({"dataset": _CountingStream}, "the dataset of the loader"),
        ({"dataset": _ShuffledStream, "num_workers": 1, "persistent_workers": True}, "in persistent workers"),
    ],
)
def test_an_order_that_no_state_holds_is_said(
    options: dict[str, Any], role: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = _boosted(lambda size: _loader(size, **options), 0, OrderStream())
    loader.state_dict()
    assert "not saved" not in caplog.text
    _values(loader)
    for _ in range(2):
        loader.state_dict()
    assert caplog.text.count("is not saved") == caplog.text.count(role) == 1


def test_a_position_in_another_dataset_is_refused() -> None:
    loader = _boosted(_KINDS["shuffle"], 0, OrderStream())
    next(iter(loader))
    other = _boosted(lambda size: DataLoader(range(_SAMPLES - 1), batch_size=size), 0, OrderStream())
    with pytest.raises(ConfigurationError, match="after 4 samples of a dataset of 23, and this one has 22"):
        other.load_state_dict(loader.state_dict())
    _values(loader)
    other.load_state_dict(loader.state_dict())


def test_a_loader_that_is_boosted_twice_is_shared_out_once() -> None:
    once = _boosted(_KINDS["in order"], 1, OrderStream())
    assert shard_dataloader(once, 1, _RANKS, torch.device("cpu"), OrderStream()) is once


def test_a_sampler_that_yields_the_shares_of_the_layout_is_kept() -> None:
    def loader(rank: int, count: int) -> DataLoader:
        return DataLoader(_DATA, batch_size=_BATCH, sampler=DistributedSampler(_DATA, count, rank, seed=3))

    for rank in range(_RANKS):
        plain = loader(rank, _RANKS)
        boosted = shard_dataloader(plain, rank, _RANKS, torch.device("cpu"), OrderStream())
        for epoch in (0, 1):
            boosted.set_epoch(epoch)
            assert _values(boosted) == _values(plain) and len(boosted) == len(plain)
    with pytest.raises(ConfigurationError, match=r"DistributedSampler yields share 2 of 4, .* omit the sampler"):
        shard_dataloader(loader(2, 4), 0, _RANKS, torch.device("cpu"), OrderStream())


def _split_stream() -> DataLoader:
    dataset = _ShuffledStream()
    dataset._distributed = type("DistributedConfig", (), {"rank": 1, "world_size": 2})()
    return DataLoader(dataset, batch_size=2)


class _OwnLoader(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_split_stream, "the dataset is share 1 of 2 already .*: give it the whole dataset"),
        (lambda: _OwnLoader(_DATA), "_OwnLoader, which iterates in a way of its own"),
        (
            lambda: pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(_DATA),
            "torchdata StatefulDataLoader, which iterates in a way of its own",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(make: Callable[[], DataLoader], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shard_dataloader(make(), 0, 2, torch.device("cpu"), OrderStream())
