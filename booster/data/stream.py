"""Packed data sets and streams: documents of any length in rows of at most a number of tokens.

A stream takes documents one after the other, tokenises them in workers and packs them into rows as they come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from booster.data.rows import (
    ATTENTION_LENGTH,
    Document,
    MostRoom,
    PackedSampler,
    PackingCollator,
    cost_of,
    first_fit,
    ids_of,
    labels_of,
    mixed,
    parts_of,
)
from booster.errors import ConfigurationError

# Documents of one message to a worker, and the least number of rows that are packed together.
_CHUNK, _WINDOW = 64, 64
# Options of torch's loader that are those of the processes that tokenise.
_OF_WORKERS = ("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")


@dataclass(frozen=True)
class _Place:
    """A place in a stream."""

    epoch: int
    row: int = 0  # number in the epoch of the first row of a window
    # document, token: the document that the window begins with, and its first token there
    document: int = 0
    token: int = 0
    # a document, and the state of the stream before it; None for one without a state
    known: tuple[int, Any] | None = None
    passed: int = 0  # rows to pass over from there


class PackedStream(IterableDataset[list[Document]]):
    """Rows of the documents of a stream; made by `pack`.

    Windows of rows are filled one after the other: each document goes into the first row of the window that has room,
    and one that fits into none begins the next window. All windows but the last have `window_rows` rows, so the rows
    depend on the documents, the options and the epoch alone, not on workers or replicas.

    Args:
        dataset: yields documents; one that is iterated again yields them again.
        tokenize: makes a document with `input_ids` of what `dataset` yields; None if that is one.
        max_tokens, too_long, seed, rows_per_step, attention_length: see `pack`; `seed` is None for rows in their order.

    Attributes:
        epoch: of the next iteration; it is counted by itself, and set by `set_epoch`.
        worker_options: options of torch's `DataLoader` for the processes that tokenise.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        max_tokens: int,
        tokenize: Callable[[Any], Any] | None,
        too_long: str,
        seed: int | None,
        rows_per_step: int,
        attention_length: int,
    ) -> None:
        self.dataset, self.max_tokens, self.tokenize, self.too_long = dataset, max_tokens, tokenize, too_long
        self.seed, self.rows_per_step, self.attention_length = seed, rows_per_step, attention_length
        self.epoch = 0
        self.worker_options: dict[str, Any] = {}
        self._next: _Place | None = None  # where the next iteration begins; None for the start of an epoch
        self._windows: deque[_Place] = deque(maxlen=2)  # that the last iteration has begun

    @property
    def window_rows(self) -> int:
        """Rows that are packed together: a multiple of `rows_per_step`."""
        return self.rows_per_step * max(1, _WINDOW // self.rows_per_step)

    def loader(self, batch_size: int = 1, cu_seq_lens: bool = False, **options: Any) -> DataLoader:
        """Return a loader of batches of one row, [1, tokens], to be passed to `boost`.

        Args:
            batch_size: packed rows that are put one behind the other, for one replica.
            cu_seq_lens: see `PackingCollator`.
            options: further options of torch's `DataLoader`. The `num_workers` processes tokenise; this one reads
                the stream and packs.
        """
        self.worker_options = {name: options.pop(name) for name in _OF_WORKERS if name in options}
        return DataLoader(self, batch_size, collate_fn=PackingCollator(cu_seq_lens), **options)

    def __iter__(self) -> Iterator[list[Document]]:
        """Yield rows: for each the `input_ids` and `labels`, [tokens] (int64), of its documents."""
        if get_worker_info() is not None:
            raise ConfigurationError(
                "a packed stream was iterated in a worker of a DataLoader, and each worker would pack all of it; use "
                "num_workers=0 there and packed.loader(num_workers=…), whose workers tokenise"
            )
        place, self._next = self._next or _Place(self.epoch), None
        self.epoch = place.epoch + 1
        self._windows.clear()
        return self._rows(place)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also of a stream that has `set_epoch`."""
        if self._next is not None and self._next.epoch != epoch:
            self._next = None
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the next iteration, and the options that rows depend on."""
        names = ("max_tokens", "too_long", "seed", "rows_per_step")
        return {"epoch": self.epoch, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the next epoch to a saved one, in its order; refuses another `max_tokens` or `too_long`."""
        for name in ("max_tokens", "too_long"):
            if state[name] != getattr(self, name):
                raise ConfigurationError(
                    f"the saved stream was packed with {name}={state[name]!r}, and this one with "
                    f"{getattr(self, name)!r}; use {name}={state[name]!r}, or leave the loader out to begin an epoch"
                )
        self.epoch, self.seed, self.rows_per_step = state["epoch"], state["seed"], state["rows_per_step"]
        self._next = None

    def place_of(self, row: int) -> dict[str, Any] | None:
        """Return what `go_to` needs to begin with a row that the last iteration has yielded; None if unknown."""
        begun = [place for place in self._windows if place.row <= row]
        return None if not begun else {**vars(begun[-1]), "passed": row - begun[-1].row}

    def go_to(self, place: dict[str, Any]) -> None:
        """Let the next iteration begin where `place_of` was asked; no document before its window is tokenised."""
        self._next = _Place(**place)

    # ----- one iteration -----

    def _rows(self, place: _Place) -> Iterator[list[Document]]:
        passed = place.passed
        for number, window in enumerate(self._packed(place), place.row // self.window_rows):
            order: Iterable[int] = range(len(window))
            if self.seed is not None:
                costs = [sum(cost_of(len(each["input_ids"]), self.attention_length) for each in row) for row in window]
                sampler = PackedSampler(costs, self.rows_per_step, mixed(self.seed, place.epoch))
                sampler.set_epoch(number)
                order = sampler
            yield from (window[row] for row in islice(order, passed, None))
            passed = max(passed - len(window), 0)

    def _packed(self, place: _Place) -> Iterator[list[list[Document]]]:
        """Yield the windows from `place` on."""
        row = place.row
        window: list[list[Document]] = []
        room = MostRoom(self.max_tokens)
        for document, token, piece, known in self._pieces(place):
            found = room.first_with(len(piece["input_ids"]))
            if not window or found == self.window_rows:
                if window:
                    yield window
                    row += len(window)
                    window, room, found = [], MostRoom(self.max_tokens), 0
                self._windows.append(_Place(place.epoch, row, document, token, known))
            if found == len(window):
                window.append([])
            window[found].append(piece)
            room.take(found, len(piece["input_ids"]))
        if window:
            yield window
        elif place == _Place(place.epoch):
            raise ConfigurationError(
                f"the stream has no token in epoch {place.epoch}; give it documents, and a data set that yields them "
                "again in each epoch, as a generator does not"
            )

    def _pieces(self, place: _Place) -> Iterator[tuple[int, int, Document, tuple[int, Any] | None]]:
        """Yield documents from `place` on: their number, first token, tokens, and a state of the stream before them."""
        number, state = place.known or (0, None)
        chunks = _Chunks(self.dataset, place, number, state)
        work = _Tokenised(self.tokenize)
        loader = DataLoader(work, None, sampler=chunks, collate_fn=_as_is, **self.worker_options)
        for ids, labels, lengths in loader:
            number, known = chunks.sent.popleft()
            end = 0
            for document, length in enumerate(lengths, number):
                start, end = end, end + length
                for first, last in parts_of(document, length, self.max_tokens, self.too_long):
                    if (document, first) < (place.document, place.token):
                        continue
                    part = slice(start + first, start + last)
                    yield document, first, {"input_ids": ids[part], "labels": labels[part]}, known


class _Chunks:
    """Reads a stream in this process, and yields its documents in chunks that a worker tokenises.

    Args:
        place: where reading begins; earlier documents are read and dropped.
        number, state: a document before `place`, and the state of the stream there; 0 and None for its start.

    Attributes:
        sent: for each chunk that was not taken yet, the number of its first document, and the last state known.
    """

    def __init__(self, dataset: Iterable[Any], place: _Place, number: int, state: Any) -> None:
        self.dataset, self.place, self.number, self.state = dataset, place, number, state
        self.sent: deque[tuple[int, tuple[int, Any] | None]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        number, dataset = self.number, self.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.place.epoch)
        if self.state is not None:
            dataset.load_state_dict(self.state)
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            number = self.place.document
            documents = map(dataset.__getitem__, range(number, len(dataset)))
        else:
            documents = iter(dataset)
            number += sum(1 for _ in islice(documents, self.place.document - number))
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        while True:
            known = (number, dataset.state_dict()) if has_state else None
            chunk = list(islice(documents, _CHUNK))
            if not chunk:
                return
            self.sent.append((number, known))
            number += len(chunk)
            yield chunk


class _Tokenised:
    """Runs in a worker: makes the tokens of a chunk of documents, in one tensor, since each takes a file handle."""

    def __init__(self, tokenize: Callable[[Any], Any] | None) -> None:
        self.tokenize = tokenize

    def __getitem__(self, chunk: list[Any]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the ids and labels of all documents, one behind the other, and the length of each."""
        items = [self.tokenize(each) for each in chunk] if self.tokenize else chunk
        ids = [torch.as_tensor(ids_of(item), dtype=torch.long) for item in items]
        if not any(isinstance(item, Mapping) and item.get("labels") is not None for item in items):
            return (joined := torch.cat(ids)), joined, [len(each) for each in ids]
        labels = [labels_of(item, own, "an item of the stream") for item, own in zip(items, ids, strict=True)]
        return torch.cat(ids), torch.cat(labels), [len(each) for each in ids]


def _as_is(chunk: Any) -> Any:
    return chunk


Piece = tuple[int, int, int]  # (item of the data set, its first token, the token behind its last)
_TOO_LONG = ("refuse", "truncate", "split")


def pack(
    dataset: Dataset | Iterable[Any],
    max_tokens: int,
    *,
    tokenize: Callable[[Any], Any] | None = None,
    too_long: str = "refuse",
    shuffle: bool = True,
    seed: int = 0,
    rows_per_step: int = 8,
    attention_length: int = ATTENTION_LENGTH,
    lengths: Sequence[int] | None = None,
) -> PackedDataset | PackedStream:
    """Pack the documents of a data set into rows of at most `max_tokens` tokens, first fit.

    Args:
        dataset: items with `input_ids` and, optionally, `labels`, both [tokens], or token ids alone. Items without
            tokens take no part. One without numbers (an iterable data set, a generator) is packed while it is read.
        max_tokens: token budget of a row.
        tokenize: makes such an item of what the data set has, in the workers of the loader. The data set is then
            packed while it is read, whatever it is.
        too_long: what to do with documents of more tokens: "refuse", "truncate" to the first `max_tokens`, or "split"
            into documents of their own.
        shuffle: whether documents are packed, and rows ordered, at random; otherwise both are in the order of the data.
        seed: of the random order; the packing is the same in each epoch, the order of the rows is not.
        rows_per_step: rows of one step over all replicas, `batch_size * dp_size`. Rows that have nearly the same cost
            come together in groups of this size.
        attention_length: length of a document at which attention costs as much as the linear layers, 12 times the
            hidden size of a usual model.
        lengths: tokens of each item, if they are known; otherwise each item is read once.

    Raises:
        ConfigurationError: for a wrong option, a data set without length, or a document that is too long.
    """
    is_stream = tokenize is not None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    _check(dataset, max_tokens, too_long, rows_per_step, attention_length, lengths, is_stream)
    if is_stream:
        options = (max_tokens, tokenize, too_long, seed if shuffle else None, rows_per_step, attention_length)
        return PackedStream(dataset, *options)
    if lengths is None:
        lengths = [len(ids_of(dataset[index])) for index in range(len(dataset))]
    longest = max(lengths, default=0)
    pieces: list[Piece] = [
        (index, *part)
        for index, length in enumerate(lengths)
        for part in parts_of(index, length, max_tokens, too_long, longest)
    ]
    if not pieces:
        raise ConfigurationError(f"the data set of {len(lengths)} items has no token; give it documents")
    if shuffle:
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
        pieces = [pieces[index] for index in order]
    found = first_fit([end - start for _, start, end in pieces], max_tokens)
    rows = [[pieces[index] for index in row] for row in found]
    costs = [sum(cost_of(end - start, attention_length) for _, start, end in row) for row in rows]
    sampler = PackedSampler(costs, rows_per_step, seed if shuffle else None)
    return PackedDataset(dataset, rows, max_tokens, sampler)


class PackedDataset(Dataset[list[Document]]):
    """Rows of documents; made by `pack`.

    Args:
        max_tokens: token budget of a row.
        sampler: yields the rows of an epoch.
    """

    def __init__(
        self, dataset: Dataset | Sequence[Any], rows: Sequence[Sequence[Piece]], max_tokens: int, sampler: PackedSampler
    ) -> None:
        self.dataset, self.rows, self.max_tokens, self.sampler = dataset, rows, max_tokens, sampler

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> list[Document]:
        """Return the documents of a row: `input_ids` and `labels`, each [tokens] (int64)."""
        return [self._document(*piece) for piece in self.rows[row]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(end - start for row in self.rows for _, start, end in row)

    @property
    def fill(self) -> float:
        """The part of the token budget of all rows that is used, 0.0 to 1.0."""
        return self.num_tokens / (len(self) * self.max_tokens)

    def loader(self, batch_size: int = 1, cu_seq_lens: bool = False, **options: Any) -> DataLoader:
        """Return a loader of batches of one row, [1, tokens], to be passed to `boost`.

        Args:
            batch_size: packed rows that are put one behind the other, for one replica.
            cu_seq_lens: see `PackingCollator`.
            options: further options of torch's `DataLoader`.
        """
        collator = PackingCollator(cu_seq_lens)
        return DataLoader(self, batch_size, sampler=self.sampler, collate_fn=collator, **options)

    def _document(self, index: int, start: int, end: int) -> Document:
        item = self.dataset[index]
        ids = torch.as_tensor(ids_of(item), dtype=torch.long)
        labels = labels_of(item, ids, f"item {index} of the data set", end)
        return {"input_ids": ids[start:end], "labels": labels[start:end]}


def _check(
    dataset: Any,
    max_tokens: int,
    too_long: str,
    rows_per_step: int,
    attention_length: int,
    lengths: Sequence[int] | None,
    is_stream: bool,
) -> None:
    counts = {"max_tokens": max_tokens, "rows_per_step": rows_per_step, "attention_length": attention_length}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name}={value!r} is no positive integer; use 1 or more")
    if too_long not in _TOO_LONG:
        raise ConfigurationError(f"too_long={too_long!r} is unknown; use {', '.join(map(repr, _TOO_LONG))}")
    if is_stream and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(f"the data set is a {type(dataset).__name__}; give pack() one that yields documents")
    if is_stream and lengths is not None:
        raise ConfigurationError(
            "lengths= is for data sets whose items have numbers, and this one is packed while it is read; leave it out"
        )
    if lengths is not None and len(lengths) != len(dataset):
        raise ConfigurationError(
            f"lengths has {len(lengths)} entries for a data set of {len(dataset)} items; give one for each"
        )
