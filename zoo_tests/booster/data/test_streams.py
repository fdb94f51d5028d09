"""Packed streams: the same rows with any number of workers and replicas, entered anywhere without reading twice.

What breaks here first: rows that depend on how far reading is ahead, or a place that leaves out or repeats a document.
Look in `booster/data/stream.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from booster.data import PackedStream, pack
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader, shard_dataloader
from plugins.hybrid_parallel.data.random_stream import OrderStream

NUMBER, BUDGET = 400, 40


def _lengths() -> list[int]:
    source = random.Random(0)
    return [source.randint(0, 24) for _ in range(NUMBER)]


def _ids(number: int, length: int) -> list[int]:
    """Tokens that no other document has."""
    return [100 * number + place + 1 for place in range(length)]


@cache
def _documents() -> list[list[int]]:
    return [_ids(number, length) for number, length in enumerate(_lengths())]


def _words(text: str) -> list[int]:
    """A tokenizer, which a worker can import."""
    return [int(word) for word in text.split()]


def _labelled(number: int) -> dict[str, list[int]]:
    ids = _documents()[number]
    return {"input_ids": ids, "labels": [-each for each in ids]}


class _Iterable(IterableDataset):
    def __iter__(self) -> Iterator[list[int]]:
        yield from _documents()


class _Numbered(Dataset):
    """A map-style data set that says where it ends by its length alone."""

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> str:
        return " ".join(map(str, _documents()[index % NUMBER]))


class _Stateful:
    """As streams of Hugging Face's datasets: its state tells where it is, in an order that depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = self.begun_at = self.at = self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun_at = state["at"]

    def __iter__(self) -> Iterator[list[int]]:
        documents = list(_documents())
        random.Random(self.epoch).shuffle(documents)
        self.at, self.begun_at = self.begun_at, 0
        for document in documents[self.at :]:
            self.at += 1
            self.read += 1
            yield document


class _Random(IterableDataset):
    """Draws its order from torch's default generator."""

    def __iter__(self) -> Iterator[list[int]]:
        documents = _documents()
        for index in torch.randperm(NUMBER).tolist():
            yield documents[index]


class _Again:
    """Calls a function for each iteration."""

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return iter(self.begin())


def _lines(folder: Path) -> _Again:
    path = folder / "documents.txt"
    path.write_text("".join(" ".join(map(str, each)) + "\n" for each in _documents()))
    return _Again(lambda: path.read_text().splitlines())


def _mixture() -> Iterator[list[int]]:
    first, second = _documents()[::2], _documents()[1::2]
    yield from itertools.chain.from_iterable(zip(first, second, strict=True))


KINDS: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "iterable dataset": lambda folder: (_Iterable(), {}),
    "generator": lambda folder: ((each for each in _documents()), {}),
    "generator function": lambda folder: (_Again(_mixture), {"shuffle": False}),
    "lines of a file": lambda folder: (_lines(folder), {"tokenize": _words}),
    "map-style, tokenised": lambda folder: (_Numbered(), {"tokenize": _words, "rows_per_step": 6}),
    "numbers, with labels": lambda folder: (_Again(lambda: range(NUMBER)), {"tokenize": _labelled}),
    "stateful": lambda folder: (_Stateful(), {}),
    "random": lambda folder: (_Random(), {}),
    "long documents, split": lambda folder: (_Again(lambda: [range(-500, 0), *_documents()]), {"too_long": "split"}),
    "endless": lambda folder: (_Again(lambda: (_ids(i, 1 + i % 30) for i in itertools.count())), {"seed": 3}),
}


def _loaders(stream: Callable[[], PackedStream], replicas: int, batch_size: int, workers: int) -> list[Any]:
    order = [OrderStream.seeded(5) for _ in range(replicas)]
    given = [stream().loader(batch_size, num_workers=workers) for _ in range(replicas)]
    device = torch.device("cpu")
    return [shard_dataloader(each, rank, replicas, device, order[rank]) for rank, each in enumerate(given)]


def _steps(loaders: list[ShardedDataLoader], number: int | None = None) -> list[list[tuple[int, int]]]:
    """The tokens and labels of each global batch."""
    batches = [itertools.islice(iter(each), number) for each in loaders]
    names = ("input_ids", "labels")  # [1, tokens], or [0, tokens] for an empty share
    return [
        [pair for each in step for pair in zip(*(each[name].flatten().tolist() for name in names), strict=True)]
        for step in zip(*batches, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_depend_on_the_stream_alone(kind: str, tmp_path: Path) -> None:
    """With any number of workers and replicas, and where an iteration is left and entered again, in two epochs."""

    def stream() -> PackedStream:
        documents, options = KINDS[kind](tmp_path)
        return pack(documents, BUDGET, **{"rows_per_step": 4, **options})

    whole = _steps(_loaders(stream, 1, 4, 0), 50)
    tokens = [token for step in whole for token, _ in step]
    assert len(set(tokens)) == len(tokens)
    if kind != "endless":
        assert set(tokens) >= {token for each in _documents() for token in each}
    assert _steps(_loaders(stream, 1, 4, 2), 50) == whole
    assert _steps(_loaders(stream, 2, 2, 0), 50) == whole
    found, loaders = [], _loaders(stream, 2, 2, 0)
    for replicas, workers, number in ((2, 0, 1), (1, 1, 16), (4, 0, 13), (2, 0, 20)):
        if found:
            state = loaders[0].state_dict()
            loaders = _loaders(stream, replicas, 4 // replicas, workers)
            for loader in loaders:
                loader.load_state_dict(state)
        found += _steps(loaders, number)
    assert found == whole


def test_a_second_epoch_has_another_order_and_is_entered_too() -> None:
    loaders = _loaders(lambda: pack(_Stateful(), BUDGET, rows_per_step=4), 2, 2, 0)
    first, second = _steps(loaders), _steps(loaders, 20)
    assert first != second and len(first) > 20
    state = loaders[0].state_dict()
    source = _Stateful()
    entered = _loaders(lambda: pack(source, BUDGET, rows_per_step=4), 1, 4, 0)
    entered[0].load_state_dict(state)
    rest = _steps(entered)
    assert {token for step in [*second, *rest] for token, _ in step} == {each for ids in _documents() for each in ids}
    assert sum(len(step) for step in [*second, *rest]) == sum(_lengths())
    assert source.read < 0.9 * NUMBER, "documents before the state were not read"


def test_rows_are_as_full_as_those_of_a_data_set_with_numbers() -> None:
    """Lengths as of texts; rows of one step have nearly the same cost."""
    source = random.Random(1)
    lengths = [min(int(source.lognormvariate(4, 1.2)) + 1, 1024) for _ in range(6000)]
    documents = [[1] * length for length in lengths]
    options = {"rows_per_step": 4, "attention_length": 256}
    rows = list(pack(_Again(lambda: documents), 1024, **options))
    fill = sum(lengths) / (len(rows) * 1024)
    assert fill > 0.98 * pack(documents, 1024, **options).fill
    costs = [sum(len(each["input_ids"]) * (256 + len(each["input_ids"])) for each in row) for row in rows]
    steps = [costs[start : start + 4] for start in range(0, len(costs) - 3, 4)]
    assert sum(max(step) for step in steps) / sum(sum(step) / 4 for step in steps) < 1.1


def test_what_cannot_be_packed_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(_documents())
    once = pack(used, BUDGET)
    assert list(once)
    with pytest.raises(ConfigurationError, match="the stream has no token in epoch 1; give it documents, and a data"):
        list(once)
    with pytest.raises(ConfigurationError, match="document 1 has 41 tokens, more than max_tokens=40; use max_tokens=4"):
        list(pack(iter([[1], [1] * 41]), BUDGET))
    with pytest.raises(ConfigurationError, match="an item of the stream has 2 input_ids and 1 labels"):
        list(pack(iter([{"input_ids": [1, 2], "labels": [1]}]), BUDGET))
    loader = _loaders(lambda: pack(_Iterable(), BUDGET), 1, 4, 0)[0]
    next(iter(loader))
    with pytest.raises(
        ConfigurationError, match="the saved stream was packed with max_tokens=40, and this one with 41"
    ):
        _loaders(lambda: pack(_Iterable(), 41), 1, 4, 0)[0].load_state_dict(loader.state_dict())
    monkeypatch.setattr("booster.data.stream.get_worker_info", lambda: "a worker")
    with pytest.raises(ConfigurationError, match="a packed stream was iterated in a worker of a DataLoader"):
        iter(pack(_Iterable(), BUDGET))
